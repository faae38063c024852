#!/bin/sh
# Installs the Debian packages whose programs the tests use, if one is missing. Without root, says
# what to run, and fails: a test without its counterpart proves nothing.
set -eu

missing=
# need PACKAGE COMMAND...: the package is missing if the command fails.
need() {
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

PATH=$PATH:/usr/sbin:/sbin
need chromium command -v chromium
need curl command -v curl
# A linker, and a compiler for what aws-lc and mimalloc have of C.
need gcc command -v cc
need faketime command -v faketime
need libc6-dev test -e /usr/include/stdio.h
need libnss-wrapper sh -c 'ls /usr/lib/*/libnss_wrapper.so'
need nghttp2-client command -v h2load
need nginx-light command -v nginx
need python3 command -v python3
need python3-venv python3 -c 'import ensurepip'
need redis-server command -v redis-server
need redis-tools command -v redis-cli
need slowhttptest command -v slowhttptest

[ -n "$missing" ] || exit 0

install="apt-get install --yes --no-install-recommends$missing"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "The tests need programs that are not installed. As root:" >&2
    echo "    apt-get update && $install" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# No service is started: the tests start their own, on their own ports.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update
$install
