#!/usr/bin/env python3
"""Checks licenses, sources and names of all dependencies against `deny.toml`, which `make advisories` checks with cargo-deny.

    python3 tests/external/check_dependencies.py    # Python 3.11 or newer

cargo-deny takes minutes to build, and this check a second. A license expression is satisfied if one of its alternatives names only
licenses of the list.
"""

import json
import os
import re
import subprocess
import sys
import tomllib

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# How cargo names crates.io, also where a mirror replaces it.
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"


def is_allowed(expression, allowed):
    """Whether an SPDX license expression is satisfied. `/` is the old form of `OR`."""
    operators = {"OR": "or", "AND": "and", "/": "or", "(": "(", ")": ")"}
    tokens = re.findall(r"[()/]|[^\s()/]+(?: WITH [^\s()/]+)?", expression)
    words = [operators.get(token, str(token in allowed)) for token in tokens]
    # Only `True`, `False`, `and`, `or` and parentheses.
    return bool(eval(" ".join(words)))


def main():
    os.chdir(ROOT)
    with open("deny.toml", "rb") as file:
        policy = tomllib.load(file)
    allowed = set(policy["licenses"]["allow"])
    denied = {ban["crate"]: ban.get("reason", "deny.toml says so") for ban in policy["bans"]["deny"]}
    command = ["cargo", "metadata", "--locked", "--all-features", "--format-version=1"]
    for target in policy["graph"]["targets"]:
        command += ["--filter-platform", target]
    packages = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["packages"]
    problems = []
    for package in packages:
        name = f"{package['name']} {package['version']}"
        if not is_allowed(package["license"] or "none", allowed):
            problems.append(f"{name}: its license is {package['license']}, which deny.toml does not allow")
        if package["source"] is not None and package["source"] != REGISTRY:
            problems.append(f"{name}: its source is {package['source']}, and not crates.io")
        if package["name"] in denied:
            problems.append(f"{name}: denied, because {denied[package['name']]}")
        if any(dependency["req"] == "*" and not dependency.get("path") for dependency in package["dependencies"]
               if package["source"] is None):
            problems.append(f"{name}: a dependency has no version")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(packages)} packages have allowed licenses and sources")


if __name__ == "__main__":
    main()
