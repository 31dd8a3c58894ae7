#!/bin/sh
# Builds the emulator with all kernels in it: build.sh OUT.so [MORE.cpp ..]. Needs a C++ compiler, and a few seconds.
# What is more than the kernels (a driver over the emulator, planted bugs) goes into the same library.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
compile() {
    # Aliasing and contraction as a device has them: none is assumed, none is done.
    "${CXX:-c++}" -std=c++17 -O1 -Wall -Wextra -Wno-unused-function -DEMULATOR -fPIC -fno-strict-aliasing \
        -ffp-contract=off -I"$here" "$@"
}
for unit in attention experts linear norms one_shot rows sample; do
    compile -DKERNELS="\"$here/../src/cuda/kernels/$unit.cu\"" -DIS_$unit -c "$here/kernels.cpp" -o "$objects/$unit.o"
done
compile -c "$here/emulator.cpp" -o "$objects/emulator.o"
for more in "$@"; do
    compile -c "$more" -o "$objects/more_$(basename "$more").o"
done
"${CXX:-c++}" -shared -pthread -o "$objects/out.so" "$objects"/*.o
# In one step, so that nobody loads a half of it.
mv "$objects/out.so" "$out.$$"
mv "$out.$$" "$out"
