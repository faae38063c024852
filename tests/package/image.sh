#!/bin/sh
# Runs the unpacked image in a network of its own, read-only, as a user that is not root, and probes it.
# Usage: image.sh ROOTFS
set -eux
ip link set lo up
# `! COMMAND` would not end the test.
fails() {
    if "$@"; then exit 1; fi
}
in_image() {
    bwrap --unshare-user --unshare-pid --unshare-ipc --die-with-parent --uid 65532 --gid 65532 --cap-drop ALL \
        --ro-bind "$rootfs" / --proc /proc --dev /dev --clearenv "$@"
}
rootfs=$1
mkdir -p "$rootfs/proc" "$rootfs/dev"
fails in_image /usr/bin/transom health --admin 127.0.0.1:9900
in_image /usr/bin/transom run --config /etc/transom/gateway.toml >"$rootfs/../log" 2>&1 &
gateway=$!
tries=100
until in_image /usr/bin/transom health --admin 127.0.0.1:9900; do
    tries=$((tries - 1))
    [ $tries != 0 ] || { cat "$rootfs/../log"; exit 1; }
    sleep 0.1
done
for _ in $(seq 33); do curl --silent --fail --output /dev/null http://127.0.0.1:8080/; done
[ "$(curl --silent --output /dev/null --write-out '%{http_code}' http://127.0.0.1:8080/)" = 429 ]
# The trusted authorities are found: no message about them.
fails grep -i 'authorit\|cannot\|panicked' "$rootfs/../log"
kill "$gateway"
wait "$gateway" || true
