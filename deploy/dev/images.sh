#!/bin/sh
# Builds the images of deploy/Dockerfile: images.sh TAG. With a registry it uses the usual bases. Without one it makes
# the base for the build from the distribution's packages and this machine's Rust, under a separate name. It then skips
# the CUDA image with a message, because no distribution has that base as a package.
set -eu

tag=$1
here=$(cd "$(dirname "$0")/../.." && pwd)
file=$here/deploy/Dockerfile
rust=rust:1.95.0-bookworm
ours=lockstep-dev/rust:1.95.0-bookworm

base_of() {
    sed -n "s/^ARG $1=//p" "$file"
}

is_at_hand() {
    docker image inspect "$1" >/dev/null 2>&1 || timeout 60 docker pull --quiet "$1" >/dev/null 2>&1
}

# A Debian from packages only, with this machine's toolchain, cargo settings and root certificates.
make_base() {
    "$here/deploy/dev/packages.sh" debootstrap:debootstrap
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    mirror=$(sed -n 's/^URIs: //p; s/^deb \([^ ]*\) .*/\1/p' /etc/apt/sources.list /etc/apt/sources.list.d/* \
        2>/dev/null | head -n 1)
    debootstrap --variant=minbase --include=ca-certificates,gcc,g++,libc6-dev,protobuf-compiler,libprotobuf-dev \
        bookworm "$folder" "${mirror:-http://deb.debian.org/debian}"
    mkdir -p "$folder/usr/local/rust" "$folder/root/.cargo"
    (cd "$(rustc --print sysroot)" && tar --create --exclude=./share --exclude=./lib/rustlib/src .) |
        tar --extract --directory="$folder/usr/local/rust"
    cp -L /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/ca-certificates.crt"
    for settings in "${CARGO_HOME:-$HOME/.cargo}"/config.toml "${CARGO_HOME:-$HOME/.cargo}"/config; do
        if [ -f "$settings" ]; then cp "$settings" "$folder/root/.cargo/"; fi
    done
    tar --create --directory="$folder" . |
        docker import \
            --change 'ENV PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
            --change 'ENV CARGO_HTTP_CAINFO=/etc/ssl/certs/ca-certificates.crt' - "$ours"
}

# The older builder has no cache mounts, so nothing is kept between two builds. It ignores an ignore list beside the
# Dockerfile. It also runs every stage, so the CUDA stage may use any base.
build() {
    if docker buildx version >/dev/null 2>&1; then
        docker build --network=host --file "$file" "$@" "$here"
    else
        folder=$(mktemp -d)
        sed 's/--mount=[^ ]* *//g' "$file" > "$folder/Dockerfile"
        sed -n 's/^!//p' "$file.dockerignore" |
            tar --create --directory="$here" --exclude=target --files-from=- --directory="$folder" Dockerfile |
            DOCKER_BUILDKIT=0 docker build --network=host --build-arg CUDA_BASE="$rust" "$@" -
        rm -r "$folder"
    fi
}

if ! is_at_hand "$rust"; then
    echo "images: no registry has $rust: $ours, made from packages, replaces it"
    docker image inspect "$ours" >/dev/null 2>&1 || make_base
    rust=$ours
fi
build --build-arg BUILD_BASE="$rust" --target cpu --tag "$tag"

cuda=$(base_of CUDA_BASE)
if is_at_hand "$cuda"; then
    build --build-arg BUILD_BASE="$rust" --target cuda --tag "$tag-cuda"
else
    echo "images: the CUDA image is LEFT OUT, because no registry has $cuda"
fi
docker image ls --format 'table {{.Repository}}:{{.Tag}}\t{{.Size}}' --filter "reference=${tag%%:*}"
