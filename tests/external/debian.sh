#!/bin/sh
# Checks for the programs that `make test` needs, and installs missing Debian packages. With the argument `build` only those that
# builds need, so that the others can be installed beside them; with `release` those of `make release`. Without root, and for
# `make release`, which may run on a production machine, it prints the command to run, and fails: a test without its counterpart
# proves nothing.
set -eu

target=${1:-test}
# Without root all missing programs are named at once.
[ "$target" != build ] || [ "$(id -u)" = 0 ] || target=test
missing=
# need PACKAGE COMMAND...: the package is missing if the command fails.
need() {
    package=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $package"
}

PATH=$PATH:/usr/sbin:/sbin
# A linker, and a C compiler for aws-lc and mimalloc.
need gcc command -v cc
need libc6-dev test -e /usr/include/stdio.h
need python3 command -v python3
if [ "$target" != build ]; then
    need nghttp2-client command -v h2load
    need nginx-light command -v nginx
    need openssl command -v openssl
    need redis-server command -v redis-server
fi
if [ "$target" = release ]; then
    need llvm-19 command -v "$PROFDATA"
fi
if [ "$target" = test ]; then
    need caddy command -v caddy
    need chromium command -v chromium
    need curl command -v curl
    need faketime command -v faketime
    need firefox-esr command -v firefox-esr
    need haproxy command -v haproxy
    need iproute2 command -v ss
    need jq command -v jq
    need libnss-wrapper sh -c 'ls /usr/lib/*/libnss_wrapper.so'
    need python3-venv python3 -c 'import ensurepip'
    need prometheus command -v promtool
    need redis-tools command -v redis-cli
    need slowhttptest command -v slowhttptest
    need systemd command -v systemd-analyze
    need valgrind command -v valgrind
fi

[ -n "$missing" ] || exit 0

install="apt-get install --yes --no-install-recommends$missing"
if [ "$target" = release ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "\`make $target\` needs programs that are not installed. As root:" >&2
    echo "    apt-get update && $install" >&2
    case $missing in
    *llvm*) echo "Instead of llvm-19, the compiler's own tools suffice: rustup component add llvm-tools" >&2 ;;
    esac
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Prevents packages from starting services: the tests start their own, on their own ports.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
echo "Installing what the tests use, from Debian:$missing"
apt-get update --quiet=2
$install --quiet=2
