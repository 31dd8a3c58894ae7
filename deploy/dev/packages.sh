#!/bin/sh
# Installs a Debian package for each missing command: packages.sh COMMAND:PACKAGE ..
# Installs only as root in CI or a container. On a personal machine it prints the line to run and continues: the step
# that needs the command fails with its own message.
set -eu

missing=""
for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
[ -n "$missing" ] || exit 0

in_container() {
    [ -n "${CI:-}" ] || [ -f /.dockerenv ] || [ -f /run/.containerenv ]
}

if [ "$(id -u)" = 0 ] && in_container && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086 # one word per package
    apt-get install -y -qq --no-install-recommends $missing
else
    echo "missing, install with: sudo apt-get install$missing"
fi
