#!/bin/sh
# Tests the packages of `make package`: the .deb in a Debian system of its own, which systemd boots in a container, and the
# image by running it read-only as its user. Needs root. Usage: run.sh BINARY
set -eu
cd "$(dirname "$0")/../.."
binary=$1
work=$PWD/target/package-test
missing=
for program in bwrap curl ip mmdebstrap skopeo systemd-nspawn umoci unshare; do
    command -v $program >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    echo "Not installed:$missing. As root:" >&2
    echo "    apt-get install --no-install-recommends bubblewrap curl iproute2 mmdebstrap skopeo systemd-container umoci" >&2
    exit 1
fi
mkdir -p "$work"

echo "== packages are reproducible"
deploy/package/build.sh "$binary" "$work/first" >/dev/null
deploy/package/build.sh "$binary" "$work/again" >/dev/null
cmp "$work/first/SHA256SUMS" "$work/again/SHA256SUMS"
(cd "$work/first" && sha256sum --check --quiet SHA256SUMS)
cargo deb --quiet --locked --no-build --no-strip --deb-version 99 --output "$work/again/" >/dev/null
# The next version ships another configuration.
next=$(echo "$work"/again/*_99_*.deb)
dpkg-deb --raw-extract "$next" "$work/next"
echo "# A new line of the next version." >>"$work/next/etc/transom/gateway.toml"
(cd "$work/next" && find . -path ./DEBIAN -prune -o -type f -printf '%P\n' | xargs md5sum >DEBIAN/md5sums)
dpkg-deb --root-owner-group --build "$work/next" "$next" >/dev/null
rm -rf "$work/next"

echo "== the .deb in a bare Debian"
if [ ! -e "$work/debian.tar" ]; then
    mmdebstrap --quiet --variant=minbase --include=curl,dbus,systemd,systemd-sysv \
        "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$work/new.tar"
    mv "$work/new.tar" "$work/debian.tar"
fi
rm -rf "$work/root"
mkdir -p "$work/root/packages"
tar --extract --file "$work/debian.tar" --directory "$work/root"
cp "$work"/first/*.deb "$work"/again/*_99_*.deb tests/package/debian.sh "$work/root/packages"
first=/packages/$(basename "$work"/first/*.deb)
second=/packages/$(basename "$work"/again/*_99_*.deb)
cat >"$work/root/etc/systemd/system/test.service" <<UNIT
[Unit]
After=multi-user.target
SuccessAction=poweroff
FailureAction=poweroff
[Service]
Type=oneshot
ExecStart=/bin/sh /packages/debian.sh $first $second
ExecStartPost=/bin/touch /packages/passed
TimeoutStartSec=300
StandardOutput=file:/packages/log
StandardError=file:/packages/log
UNIT
mkdir -p "$work/root/etc/systemd/system/multi-user.target.wants"
ln -s ../test.service "$work/root/etc/systemd/system/multi-user.target.wants/test.service"
start=$(date +%s)
timeout --kill-after=10 400 systemd-nspawn --kill-signal=SIGKILL --quiet --register=no --keep-unit --private-network --directory "$work/root" \
    --boot --console=read-only </dev/null >"$work/boot.log" 2>&1 || true
if [ ! -e "$work/root/packages/passed" ]; then
    tail --lines=40 "$work/root/packages/log" "$work/boot.log"
    exit 1
fi
echo "passed in $(($(date +%s) - start)) s, with the start of the system; first refusal $(cat "$work/root/packages/first-refusal-s") s after dpkg"

echo "== the image"
python3 tests/package/check_image.py "$work/first/image"
skopeo inspect "oci:$work/first/image" >/dev/null
rm -rf "$work/image"
umoci unpack --image "$work/first/image:$("$binary" --version | cut -d' ' -f2)" "$work/image"
unshare --net tests/package/image.sh "$work/image/rootfs" >"$work/image.log" 2>&1 || { cat "$work/image.log"; exit 1; }
cp "$work/root/packages/log" "$work/debian.log"
rm -rf "$work/root" "$work/image"
