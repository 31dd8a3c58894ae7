#!/bin/sh
# Builds the program of an earlier commit: `before.sh COMMIT FOLDER`. It becomes FOLDER/lockstep-COMMIT, and an existing
# one is left as it is. The sources and the build stay in the folder, so that the next commit builds less.
set -eu

commit=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
program="$folder/lockstep-$commit"
if [ -x "$program" ]; then
    exit 0
fi
if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
    echo "this clone does not have the commit $commit: fetch it, or name another with BEFORE=" >&2
    exit 1
fi
sources="$folder/sources"
if [ -e "$sources/.git" ]; then
    git -C "$sources" checkout --quiet --force --detach "$commit"
else
    git worktree prune
    git worktree add --quiet --force --detach "$sources" "$commit"
fi
echo "building the program of $commit: ten minutes on two cores"
(cd "$sources" && CARGO_TARGET_DIR="$folder/build" "${CARGO:-cargo}" build --locked --bin lockstep)
cp "$folder/build/debug/lockstep" "$program.partial"
mv "$program.partial" "$program"
