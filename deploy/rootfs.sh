#!/bin/sh
# Makes the file system of an image without a distribution: the program, the libraries that it is linked with, the
# roots of trust, a user. rootfs.sh PROGRAM FOLDER
set -eu

program=$1
root=$2
mkdir -p "$root/etc/ssl/certs" "$root/cache" "$root/tmp"

cp "$program" "$root/lockstep"
chmod 0755 "$root/lockstep"

# Each library where the program looks for it, as a file and not as a link; the loader is among them.
ldd "$program" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done

cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
echo 'lockstep:x:65532:65532::/cache:/none' > "$root/etc/passwd"
echo 'lockstep:x:65532:' > "$root/etc/group"
# Names by file and DNS, whose code is within the C library.
echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
