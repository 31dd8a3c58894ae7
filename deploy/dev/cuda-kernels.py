#!/usr/bin/env python3
"""Compiles every CUDA kernel, without a device, and compares it with a committed table of registers.

    cuda-kernels.py [--write]

The compilers come from Python packages, pinned, into target/. NVRTC compiles the shipped kernels, so it must accept
every unit with only the repository's headers. The numbers come from nvcc. A kernel fails if it uses more registers,
shared memory or stack (local arrays and spilled registers) than its row in the table, or has no row. `--write` writes a
new table, to review and commit.
"""

import argparse
import concurrent.futures
import ctypes
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / "worker/backend/src/cuda/kernels"
UNITS = sorted(KERNELS.glob("*.cu"))
TABLE = KERNELS / "registers.txt"
TOOLCHAIN = ROOT / "target/cuda-toolchain"
PACKAGES = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-nvrtc==13.0.88",
]
ARCHS = ["sm_80", "sm_90a", "sm_100"]
# The flags that kernels.cuh requires.
OPTIONS = ["-std=c++17", "-fmad=false"]
ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:.*?(\d+) bytes smem)?",
)


def toolchain():
    """Returns the folder of the compilers, which are fetched once for each set of versions."""
    ready = TOOLCHAIN / ".ready"
    versions = "\n".join(PACKAGES)
    if not ready.exists() or ready.read_text() != versions:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--root-user-action", "ignore"]
        subprocess.run([*pip, "--upgrade", "--target", str(TOOLCHAIN), *PACKAGES], check=True)
        ready.write_text(versions)
    root = TOOLCHAIN / "nvidia/cu13"
    for program in [*(root / "bin").iterdir(), *(root / "nvvm/bin").iterdir()]:
        if program.is_file():
            program.chmod(program.stat().st_mode | 0o111)
    return root


def strings(texts):
    return (ctypes.c_char_p * len(texts))(*[text if isinstance(text, bytes) else text.encode() for text in texts])


def compile_by_nvrtc(nvrtc, unit):
    """Compiles, and fails with the compiler's log."""
    headers = sorted(KERNELS.glob("*.cuh"))
    texts, names = strings([header.read_bytes() for header in headers]), strings([header.name for header in headers])
    program, source = ctypes.c_void_p(), ctypes.c_char_p(unit.read_bytes())
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, unit.name.encode(), len(headers), texts, names)
    options = strings([*OPTIONS, "-default-device", f"--gpu-architecture={ARCHS[-1]}"])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if failed:
        sys.exit(f"NVRTC cannot compile {unit.name}:\n{log.value.decode()}")


def load_nvrtc(root):
    # NVRTC looks its builtins up by name: they are loaded before, because the packages are in no standard folder.
    for builtins in (root / "lib").glob("libnvrtc-builtins.so.13*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(root / "lib/libnvrtc.so.13"))


def compiled(nvcc, unit, arch, folder):
    """Returns what the assembler reports of each kernel: {name: (stack, spilled, registers, shared)}."""
    out = pathlib.Path(folder) / f"{unit.stem}.{arch}.cubin"
    command = [nvcc, f"-arch={arch}", *OPTIONS, "-cubin", "-Xptxas", "-v", "-o", out, unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{unit.name} for {arch}:\n{done.stdout}{done.stderr}")
    # The output lists one kernel after another, with a line for each fact.
    entries = re.split(r"(?=ptxas info\s+: Compiling entry function)", done.stderr)
    found = {}
    for entry in filter(None, (ENTRY.search(part.replace("\n", " ")) for part in entries)):
        name, stack, stores, loads, registers, shared = entry.groups()
        found[name] = (int(stack), int(stores) + int(loads), int(registers), int(shared or 0))
    return found


def measure(nvcc):
    """{(kernel, arch): (stack, spilled, registers, shared)}"""
    jobs = [(unit, arch) for unit in UNITS for arch in ARCHS]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda job: compiled(nvcc, *job, folder), jobs)
        return {(name, arch): entry for (_, arch), found in zip(jobs, results) for name, entry in found.items()}


def table_of(measured):
    """Returns a line for each kernel: registers on each architecture, bytes of static shared memory, and of stack."""
    lines = [f"{'kernel':<28}" + "".join(f"{arch:>8}" for arch in ARCHS) + f"{'shared':>8}{'stack':>8}"]
    for name in sorted({name for name, _ in measured}):
        entries = [measured[name, arch] for arch in ARCHS]
        registers = "".join(f"{entry[2]:>8}" for entry in entries)
        shared, stack = (max(entry[column] for entry in entries) for column in (3, 0))
        lines.append(f"{name:<28}{registers}{shared:>8}{stack:>8}")
    return "\n".join(lines) + "\n"


def read_table():
    rows = [line.split() for line in TABLE.read_text().splitlines()[1:]]
    return {row[0]: [int(number) for number in row[1:]] for row in rows}


def complaints(measured, table):
    names = {name for name, _ in measured}
    yield from (f"{name} is in the table, but in no kernel file" for name in sorted(set(table) - names))
    yield from (f"{name} is not in the table" for name in sorted(names - set(table)))
    for (name, arch), (stack, spilled, registers, shared) in sorted(measured.items()):
        if name in table:
            most, most_shared, most_stack = table[name][ARCHS.index(arch)], *table[name][-2:]
            if stack > most_stack:
                yield (f"{name} for {arch} has a stack frame of {stack} bytes, the table has {most_stack}; it moves "
                       f"{spilled} bytes of spilled registers")
            if registers > most:
                yield f"{name} for {arch} uses {registers} registers; the table allows {most}"
            if shared > most_shared:
                yield f"{name} for {arch} uses {shared} bytes of shared memory; the table allows {most_shared}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write a new table")
    arguments = parser.parse_args()
    root = toolchain()
    nvrtc = load_nvrtc(root)
    for unit in UNITS:
        compile_by_nvrtc(nvrtc, unit)
    measured = measure(root / "bin/nvcc")
    if arguments.write:
        TABLE.write_text(table_of(measured))
    wrong = list(complaints(measured, read_table()))
    if wrong:
        sys.exit("\n".join(wrong))
    n_kernels = len({name for name, _ in measured})
    print(f"{n_kernels} kernels for {', '.join(ARCHS)}: no more registers, shared memory or stack than in the table")


if __name__ == "__main__":
    main()
