#!/bin/sh
# Prints an LD_LIBRARY_PATH with the folders of NVRTC, cuBLASLt and NCCL that the system does not search by default: of
# Python packages, and of installers. Folders that are already set come first.
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
