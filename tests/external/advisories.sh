#!/bin/sh
# Checks the dependencies for known vulnerabilities, with the database of RustSec. An advisory fails. If the database cannot be
# downloaded, `advisories.sh` fails, and `advisories.sh --if-available` says that the check was skipped.
set -eu

# A download that hangs ends after so many seconds, with exit code 124.
LIMIT_S=120
status=0
output=$(timeout "$LIMIT_S" cargo deny --locked fetch db 2>&1) || status=$?
if [ "$status" != 0 ]; then
    printf '%s\n' "$output" | tail -n 20 >&2
    case $status:$output in
    124:* | *"failed to fetch advisory database"*) ;;
    *) exit "$status" ;;
    esac
    if [ "${1:-}" != --if-available ]; then
        echo "The advisory database of RustSec cannot be downloaded." >&2
        exit 1
    fi
    echo "SKIPPED: the check for known vulnerabilities. The advisory database of RustSec cannot be downloaded."
    exit 0
fi
cargo deny --locked --offline check advisories
echo "Checked: the dependencies have no known vulnerability."
