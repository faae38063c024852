#!/bin/sh
# Copies the documentation, and the files to which its pages link, into a folder, as they lie in the repository: for packages and
# for the web site. Usage: documentation.sh FOLDER
set -eu
cd "$(dirname "$0")/../.."
mkdir -p "$1"
cp -R --parents --target-directory "$1" ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md README.md SECURITY.md LICENSE-APACHE LICENSE-MIT \
	gateway.toml docs examples deploy/*.* deploy/kubernetes deploy/package/gateway.toml \
	benches/*.md benches/*.svg benches/pingora/src crates/limiter/README.md crates/limiter/examples
