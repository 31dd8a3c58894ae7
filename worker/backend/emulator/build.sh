#!/bin/sh
# Builds the emulator with all kernels in it: build.sh OUT.so [MORE.cpp ..]. Needs a C++ compiler, and a few seconds.
# Further sources (a driver over the emulator, planted bugs) go into the same library.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
compile() {
    # As on a device: no strict aliasing, and no contraction to fused multiply-adds.
    "${CXX:-c++}" -std=c++17 -O1 -Wall -Wextra -Wno-unused-function -DEMULATOR -fPIC -fno-strict-aliasing \
        -ffp-contract=off -I"$here" "$@"
}
for unit in attention experts linear norms one_shot rows sample warpgroups wide; do
    compile -DKERNELS="\"$here/../src/cuda/kernels/$unit.cu\"" -DIS_$unit -c "$here/kernels.cpp" -o "$objects/$unit.o"
done
compile -c "$here/emulator.cpp" -o "$objects/emulator.o"
for more in "$@"; do
    compile -c "$more" -o "$objects/more_$(basename "$more").o"
done
"${CXX:-c++}" -shared -pthread -o "$objects/out.so" "$objects"/*.o
# Renames in one step, so that no process loads a partial file.
mv "$objects/out.so" "$out.$$"
mv "$out.$$" "$out"
