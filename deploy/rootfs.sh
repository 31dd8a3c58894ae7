#!/bin/sh
# Makes the file system of an image without a distribution: the program, the libraries that it is linked with, root
# certificates, a user. rootfs.sh PROGRAM FOLDER
set -eu

program=$1
root=$2
mkdir -p "$root/etc/ssl/certs" "$root/cache" "$root/tmp"

cp "$program" "$root/lockstep"
chmod 0755 "$root/lockstep"

# Copies each library, and the loader, to the path where the program looks for it, as a file and not as a link.
ldd "$program" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done

cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
echo 'lockstep:x:65532:65532::/cache:/none' > "$root/etc/passwd"
echo 'lockstep:x:65532:' > "$root/etc/group"
# Resolves names by file and DNS: the C library contains the code of both.
echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
