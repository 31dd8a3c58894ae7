"""Builds images without a registry: around the debug binary, and around programs of this machine. Uses Docker's command
line and is independent of Compose."""

import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The same settings as in the last stage of deploy/Dockerfile.
SETTINGS = ['ENTRYPOINT ["/lockstep"]', "USER 65532:65532", "ENV LOCKSTEP_CACHE=/cache HOME=/cache"]
USER = 65532


def docker(*arguments, stdin=None, seconds=120):
    """Returns the output of a command; if it fails, raises an error with the command's messages."""
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, timeout=seconds)
    if done.returncode != 0:
        raise AssertionError(f"docker {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout.decode()


def has_daemon():
    """Returns whether a daemon answers."""
    try:
        docker("version", seconds=20)
        return True
    except (OSError, AssertionError, subprocess.TimeoutExpired):
        return False


def cannot_run():
    """Returns why a daemon cannot run containers, as within some sandboxes, or None. Tries it with a small program."""
    name = "lockstep-test/probe"
    try:
        with tempfile.TemporaryDirectory() as folder:
            program = with_libraries("/bin/true")
            subprocess.run(["cp", "-L", "--parents", *program, folder], check=True, timeout=60)
            import_image(name, folder, [])
        docker("run", "--rm", name, "/bin/true")
        return None
    except AssertionError as error:
        return str(error)
    finally:
        subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, timeout=60)


def make_lockstep_image(name, binary):
    """Makes an image from the small image's file system around a binary, without its debug information."""
    with tempfile.TemporaryDirectory() as folder:
        program, root = f"{folder}/lockstep", f"{folder}/root"
        subprocess.run(["strip", "--strip-all", "-o", program, str(binary)], check=True, timeout=60)
        subprocess.run([str(ROOT / "deploy" / "rootfs.sh"), program, root], check=True, timeout=60)
        import_image(name, root, SETTINGS)


def make_program_image(name, program, settings):
    """Makes an image of a program of this machine, with the libraries that it is linked with."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        (root / "tmp").mkdir(parents=True)
        subprocess.run(["cp", "-L", "--parents", *with_libraries(program), str(root)], check=True, timeout=60)
        import_image(name, root, settings)


def with_libraries(program):
    """Returns the paths of the program and of its libraries. A static program has none."""
    output = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=20).stdout
    words = (word for line in output.splitlines() for word in line.split())
    return [program, *(word for word in words if word.startswith("/"))]


def import_image(name, root, settings):
    """Imports a file system as an image. The user owns the caches, as in the Dockerfile: new volumes take the owner."""
    def owned(entry):
        is_writable = entry.name.split("/")[1:2] in (["cache"], ["tmp"])
        entry.uid = entry.gid = USER if is_writable else 0
        return entry

    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.add(root, arcname=".", filter=owned)
    changes = [word for setting in settings for word in ("--change", setting)]
    docker("import", *changes, "-", name, stdin=tar.getvalue())


def fill_volume(volume, image, folder, into):
    """Copies a folder into a volume, with the image's user as the owner of the files."""
    tar = io.BytesIO()

    def owned(entry):
        entry.uid = entry.gid = USER
        return entry

    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.add(folder, arcname=into, filter=owned)
    container = docker("create", "--volume", f"{volume}:/cache", image, "token").strip()
    try:
        docker("cp", "-", f"{container}:/cache", stdin=tar.getvalue())
    finally:
        docker("rm", container)
