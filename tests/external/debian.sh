#!/bin/sh
# Checks for the programs that a target needs, and installs missing Debian packages. Targets: `build`: all builds; `test`: `make
# test`; `venv`: environments of PyPI; `release`: `make release`. Without root, and for `make release`, which may run on a production
# machine, it prints the command to run, and fails.
set -eu

target=$1
missing=
reasons=
# need PACKAGE REASON COMMAND...: the package is missing if the command fails.
need() {
    package=$1
    reason=$2
    shift 2
    "$@" >/dev/null 2>&1 && return
    missing="$missing $package"
    reasons="$reasons
    $package: $reason"
}

PATH=$PATH:/usr/sbin:/sbin
need gcc 'linker, and C compiler of aws-lc and mimalloc' command -v cc
need libc6-dev 'headers of the C library, for the same' test -e /usr/include/stdio.h
need python3 'runs the tests, measurements and test servers' command -v python3
if [ "$target" = venv ] || [ "$target" = test ]; then
    need python3-venv 'environments of test servers and clients from PyPI' python3 -c 'import ensurepip'
fi
if [ "$target" = release ] || [ "$target" = test ]; then
    need nghttp2-client 'h2load, a client of HTTP/2 for tests and load' command -v h2load
    need nginx-light 'upstream server of tests and load; asks for decisions by auth_request' command -v nginx
    need openssl 'keys and certificates of guides and load tests' command -v openssl
    need redis-server 'store of shared counters, its clusters and sentinels' command -v redis-server
fi
if [ "$target" = release ]; then
    need llvm-19 'llvm-profdata, which joins the profiles of the load' command -v "$PROFDATA"
fi
if [ "$target" = test ]; then
    need caddy 'asks for decisions by forward_auth' command -v caddy
    need chromium-headless-shell 'dashboard, report of simulate, and HTTP/2 of a browser' command -v chromium-headless-shell
    need curl 'client of each version of HTTP; commands of guides' command -v curl
    need faketime 'steps of the clock, in the gateway and in Redis' command -v faketime
    need firefox-esr 'dashboard in a second browser' command -v firefox-esr
    need haproxy 'balancer before the gateway, with PROXY headers' command -v haproxy
    need iproute2 'ss, which shows queues of listening sockets' command -v ss
    need jq 'commands of guides' command -v jq
    need libnss-wrapper 'names of servers that resolve to other addresses during a test' sh -c 'ls /usr/lib/*/libnss_wrapper.so'
    need pebble 'authority that issues certificates over ACME, and its DNS server' command -v pebble
    need prometheus 'promtool, which checks metrics, alerts and recording rules' command -v promtool
    need redis-tools 'redis-cli, which creates clusters' command -v redis-cli
    need slowhttptest 'clients that send and read slowly' command -v slowhttptest
    need systemd 'systemd-analyze, which checks the units' command -v systemd-analyze
    need valgrind 'counts the instructions of a request' command -v valgrind
fi

[ -n "$missing" ] || exit 0

install="apt-get install --yes --no-install-recommends$missing"
if [ "$target" = release ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "Programs are not installed:$reasons" >&2
    echo "As root:" >&2
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
echo "Installing from Debian:$reasons"
apt-get update --quiet=2
$install --quiet=2
