#!/bin/sh
# A LD_LIBRARY_PATH with the folders in which NVRTC, cuBLASLt and NCCL lie where the system does not look by itself:
# those of Python's packages, and those of installers. What is set already comes first.
#
#   LD_LIBRARY_PATH=$(deploy/dev/cuda-libraries.sh [PYTHON]) target/release/lockstep serve --device cuda
set -eu
of_packages() {
    "$1" -c 'import glob, sys
for path in filter(None, sys.path):
    print("\n".join(sorted(glob.glob(path + "/nvidia/*/lib"))))' 2>/dev/null || true
}
found="${LD_LIBRARY_PATH:-}"
for folder in $(of_packages "${1:-python3}") /usr/local/cuda/lib64 /usr/local/nvidia/lib64; do
    if [ -d "$folder" ]; then found="${found:+$found:}$folder"; fi
done
echo "$found"
