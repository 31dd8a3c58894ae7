"""Checks the crates that changed since a commit, and the crates that depend on them directly: subjects of commits,
formatting, laws, lints, tests. Prints the seconds of each part, and what it leaves out.

    quick.py [COMMIT]    the default is origin/main, or else HEAD: what is not committed yet
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CARGO = os.environ.get("CARGO", "cargo")
# Everything is built as `make test` builds it: with packages chosen by name, their dependencies have other features.
WHOLE = ["--workspace", "--locked"]

# Of the tests of whole clusters, two that compare every way to compute an answer, with attention and with a recurrence.
# The others take a quarter of an hour.
CLUSTERS = "lockstep"
PROMISE = ["same_bits::llama_f32_tied", "same_bits::lfm2"]
# Folders whose checks are not tests of a crate, and the commands that run them.
ELSEWHERE = {
    "deploy/": "make compose, make telemetry, make images",
    "helm/": "make helm",
    "proto/": "make proto",
    "router/": "make clients",
    "router/faces/": "make clients",
    "router/faces/page/": "make page",
    "tests/clients/": "make clients",
    "tests/page/": "make page",
    "worker/backend/src/cuda/": "make kernels",
    "worker/collective/": "make loom",
}
LAWS = "tidy"


# `area: imperative`, or several areas with commas between them.
SUBJECT = re.compile(r"[a-z0-9_.-]+(, [a-z0-9_.-]+)*: [a-z]\S*( \S+)*")
SUBJECT_MAX = 72


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def base(arguments):
    """The commit to compare with."""
    if arguments:
        return arguments[0]
    remote = subprocess.run(["git", "rev-parse", "--quiet", "--verify", "origin/main"], cwd=ROOT, capture_output=True)
    return "origin/main" if remote.returncode == 0 else "HEAD"


def wrong_subjects(commit):
    """Subjects of commits since then that have another form, or are too long."""
    subjects = output("git", "log", "--no-merges", "--format=%s", f"{commit}..HEAD").splitlines()
    return [subject for subject in subjects if not SUBJECT.fullmatch(subject) or len(subject) > SUBJECT_MAX]


def changed_files(commit):
    """Paths from the root, with those that git does not track yet."""
    tracked = output("git", "diff", "--name-only", commit)
    untracked = output("git", "ls-files", "--others", "--exclude-standard")
    return (tracked + untracked).split()


class Workspace:
    """The crates, where they are, and which depend on which."""

    def __init__(self):
        packages = json.loads(output(CARGO, "metadata", "--no-deps", "--locked", "--format-version", "1"))["packages"]
        self.folders = {package["name"]: folder_of(package["manifest_path"]) for package in packages}
        self.dependencies = {
            package["name"]: {it["name"] for it in package["dependencies"] if it.get("path")} for package in packages
        }
        self.root = next(name for name, folder in self.folders.items() if not folder)

    def package_of(self, file):
        """The crate that a file belongs to, or None: documents and benches' results belong to no crate."""
        holders = [name for name, folder in self.folders.items() if file.startswith(folder)]
        name = max(holders, key=lambda name: len(self.folders[name]))
        is_source = name != self.root or file.startswith(("src/", "tests/")) or file.startswith("Cargo.")
        return name if is_source else None

    def dependants(self, changed):
        return {name for name, uses in self.dependencies.items() if uses & changed} - changed


def folder_of(manifest):
    """A crate's folder from the root, with a slash at its end; the root's is empty."""
    folder = os.path.relpath(os.path.dirname(manifest), ROOT)
    return "" if folder == "." else folder + "/"


class Parts:
    """The parts of the check and their seconds. One that fails ends the program."""

    def __init__(self):
        self.seconds = {}

    def run(self, part, *command, cwd=ROOT, **options):
        print(f"\n== {part}: {' '.join(map(str, command))}", flush=True)
        start = time.monotonic()
        done = subprocess.run(command, cwd=cwd, **options)
        self.seconds[part] = self.seconds.get(part, 0) + time.monotonic() - start
        if done.returncode != 0:
            self.print()
            sys.exit(f"failed in: {part}")
        return done.stdout

    def print(self):
        print(f"\n{'part':<12} {'seconds':>8}")
        for part, n in [*self.seconds.items(), ("all", sum(self.seconds.values()))]:
            print(f"{part:<12} {n:>8.0f}")


def built_tests(parts):
    """Builds all tests: (crate's folder, target's name, program) of each."""
    lines = parts.run("build", CARGO, "test", *WHOLE, "--no-run", "--message-format", "json-render-diagnostics",
                      stdout=subprocess.PIPE, text=True)
    made = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
    return [(folder_of(it["manifest_path"]), it["target"]["name"], it["executable"])
            for it in made if it.get("executable") and it["profile"]["test"]]


def run_tests(parts, workspace, selected):
    folders = {workspace.folders[name]: name for name in selected}
    tests = [(folders[folder], target, program)
             for folder, target, program in built_tests(parts) if folder in folders]
    for name, target, program in sorted(tests):
        folder = ROOT / workspace.folders[name]
        if name != workspace.root:
            parts.run(name, program, "-q", cwd=folder)
        elif pathlib.Path(program).name.startswith(f"{CLUSTERS}-") and is_clusters(program):
            parts.run("promise", program, "-q", *PROMISE, cwd=folder)


def is_clusters(program):
    """Whether this program has the tests of whole clusters: the binary's own tests have the same name."""
    return PROMISE[0] in output(program, "--list")


def main():
    commit = base(sys.argv[1:])
    workspace, files, parts = Workspace(), changed_files(commit), Parts()
    changed = {name for name in map(workspace.package_of, files) if name}
    dependants = workspace.dependants(changed)
    names = lambda of: ", ".join(sorted(of)) or "-"
    print(f"since {commit}: {len(files)} files; changed: {names(changed)}; depend on them: {names(dependants)}")

    if wrong := wrong_subjects(commit):
        sys.exit(f"a subject is `area: imperative` of at most {SUBJECT_MAX} characters:\n  " + "\n  ".join(wrong))
    parts.run("format", CARGO, "fmt", "--all", "--check")
    if changed:
        parts.run("lints", CARGO, "clippy", *WHOLE, "--all-targets", "--", "-D", "warnings")
    run_tests(parts, workspace, changed | dependants | {LAWS})

    parts.print()
    others = set(workspace.folders) - changed - dependants - {workspace.root, LAWS}
    print(f"\nleft out:\n  tests of {names(others)}\n  tests of whole clusters, but for {names(PROMISE)}: make test")
    for command in sorted({command for folder, command in ELSEWHERE.items()
                           if any(file.startswith(folder) for file in files)}):
        print(f"  {command}")


if __name__ == "__main__":
    main()
