"""Checks the crates that changed since a commit, and the crates that depend on them directly: formatting, lints, tests.
Prints the seconds of each part, and what it leaves out.

    quick.py [COMMIT]    the default is origin/main, or else HEAD: what is not committed yet
"""

import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CARGO = os.environ.get("CARGO", "cargo")

# Of the root package, the tests of this target that show the promise on one machine. The rest takes half an hour.
PROMISE = ["--test", "lockstep", "--", "same_bits"]
# Folders whose checks are no crate's tests, and what runs them.
ELSEWHERE = {
    "deploy/": "make compose, make telemetry, make images",
    "helm/": "make helm",
    "proto/": "make proto",
    "router/": "make clients",
    "router/page/": "make page",
    "tests/clients/": "make clients",
    "tests/page/": "make page",
    "worker/backend/src/cuda/": "make kernels",
    "worker/collective/": "make loom",
}
EVERYTHING = ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"]


def output(*command):
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def base(arguments):
    """The commit to compare with."""
    if arguments:
        return arguments[0]
    remote = subprocess.run(["git", "rev-parse", "--quiet", "--verify", "origin/main"], cwd=ROOT, capture_output=True)
    return "origin/main" if remote.returncode == 0 else "HEAD"


def changed_files(commit):
    """Paths from the root, with those that git does not track yet."""
    tracked = output("git", "diff", "--name-only", commit)
    untracked = output("git", "ls-files", "--others", "--exclude-standard")
    return (tracked + untracked).split()


class Workspace:
    """The crates, where they are, and which depend on which."""

    def __init__(self):
        metadata = json.loads(output(CARGO, "metadata", "--no-deps", "--locked", "--format-version", "1"))
        packages = metadata["packages"]
        folder = lambda package: os.path.relpath(os.path.dirname(package["manifest_path"]), ROOT)
        self.folders = {package["name"]: "" if folder(package) == "." else folder(package) + "/" for package in packages}
        self.dependencies = {
            package["name"]: {it["name"] for it in package["dependencies"] if it.get("path")} for package in packages
        }
        self.root = next(name for name, folder in self.folders.items() if not folder)

    def package_of(self, file):
        """The crate that a file belongs to, or None: documents and benches' results are no crate's."""
        name = max((name for name in self.folders if file.startswith(self.folders[name])), key=self.depth)
        is_source = name != self.root or file.startswith(("src/", "tests/")) or file in EVERYTHING
        return name if is_source else None

    def depth(self, name):
        return len(self.folders[name])

    def dependants(self, changed):
        return {name for name, uses in self.dependencies.items() if uses & changed} - changed


def run(part, seconds, *command):
    """Runs a part; ends the program where it fails."""
    print(f"\n== {part}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT).returncode
    seconds[part] = time.monotonic() - start
    if status != 0:
        print_seconds(seconds)
        sys.exit(f"failed in: {part}")


def print_seconds(seconds):
    print(f"\n{'part':<12} {'seconds':>8}")
    for part, n in [*seconds.items(), ("all", sum(seconds.values()))]:
        print(f"{part:<12} {n:>8.0f}")


def packages(names):
    return [argument for name in sorted(names) for argument in ("-p", name)]


def main():
    commit = base(sys.argv[1:])
    workspace, files = Workspace(), changed_files(commit)
    changed = {name for name in map(workspace.package_of, files) if name}
    dependants = workspace.dependants(changed)
    crates = (changed | dependants) - {workspace.root}
    has_root = workspace.root in changed | dependants
    names = lambda of: ", ".join(sorted(of)) or "-"
    print(f"since {commit}: {len(files)} files; changed: {names(changed)}; depend on them: {names(dependants)}")

    seconds = {}
    run("format", seconds, CARGO, "fmt", "--all", "--check")
    run("tidy", seconds, CARGO, "test", "--locked", "-p", "tidy")
    if changed:
        selected = packages(changed | dependants)
        run("lints", seconds, CARGO, "clippy", "--locked", "--all-targets", *selected, "--", "-D", "warnings")
    if crates:
        run("tests", seconds, CARGO, "test", "--locked", *packages(crates))
    if has_root:
        run("binary", seconds, CARGO, "test", "--locked", "-p", workspace.root, "--bins")
        run("promise", seconds, CARGO, "test", "--locked", "-p", workspace.root, *PROMISE)

    print_seconds(seconds)
    left_out = {command for folder, command in ELSEWHERE.items() if any(file.startswith(folder) for file in files)}
    others = set(workspace.folders) - changed - dependants - {workspace.root}
    print(f"\nleft out:\n  tests of {names(others)}\n  tests/: all of the root package but {' '.join(PROMISE[3:])}")
    for command in sorted(left_out):
        print(f"  {command}")
    if any(file in EVERYTHING for file in files):
        print("  every crate that depends on what the lock file changed: make check, make test")


if __name__ == "__main__":
    main()
