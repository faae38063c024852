#!/bin/sh
# Packages a binary of the gateway: a .deb, a tarball, a container image (OCI image layout), and their checksums. The
# results depend on the binary, the source, SOURCE_DATE_EPOCH and, for the image, the C library of this machine.
# Usage: build.sh BINARY FOLDER [VERSION OF THE .deb]
set -eu
cd "$(dirname "$0")/../.."
binary=$1
folder=$2
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
# Modes of files do not depend on the user's.
umask 022

version=$("$binary" --version | cut -d' ' -f2)
name=transom-$version-linux-$(uname -m)
# The assets of [package.metadata.deb] in Cargo.toml.
stage=target/package-stage
rm -rf "$stage" "$folder"
mkdir -p "$stage" "$folder"
install -m 755 "$binary" "$stage/transom"
strip --strip-all "$stage/transom"
"$binary" man >"$stage/transom.1"
gzip -9 --no-name "$stage/transom.1"
"$binary" schema >"$stage/gateway.schema.json"
"$binary" completions bash >"$stage/transom.bash"
"$binary" completions zsh >"$stage/_transom"
"$binary" completions fish >"$stage/transom.fish"
deploy/package/documentation.sh "$stage/doc"

cargo deb --quiet --locked --no-build --no-strip ${3:+--deb-version "$3"} --output "$folder/"

tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --format=gnu \
	--directory "$stage" --transform "s,^\./doc\(/\|$\),$name\1,;s,^\.,$name," . | gzip -9 --no-name >"$folder/$name.tar.gz"

python3 deploy/package/image.py --transom "$stage/transom" --config deploy/package/image.toml --version "$version" \
	--layout "$folder/image"
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --format=gnu \
	--directory "$folder/image" --file "$folder/$name-image.tar" blobs index.json oci-layout

cd "$folder"
sha256sum -- *.deb *.tar.gz *.tar >SHA256SUMS
ls -l
