#!/usr/bin/env python3
"""Checks licenses, sources and names of all dependencies against `deny.toml`, which `make advisories` checks with cargo-deny; that
the code of each package names all of its dependencies; and that the fuzz targets, which have a lock file of their own, are built with
the same versions.

    python3 tests/external/check_dependencies.py    # Python 3.11 or newer

cargo-deny takes minutes to build, and this check a second. A license expression is satisfied if one of its alternatives names only
licenses of the list.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# How cargo names crates.io, also where a mirror replaces it.
REGISTRY = "registry+https://github.com/rust-lang/crates.io-index"

# Dependencies that no code names, and why.
WITHOUT_USE = {
    "idna_adapter": "its version chooses what the url crate is built with",
    "serde_core": "its features, which tests of the limiter need, are those of all test builds",
}


def is_allowed(expression, allowed):
    """Whether an SPDX license expression is satisfied. `/` is the old form of `OR`."""
    operators = {"OR": "or", "AND": "and", "/": "or", "(": "(", ")": ")"}
    tokens = re.findall(r"[()/]|[^\s()/]+(?: WITH [^\s()/]+)?", expression)
    words = [operators.get(token, str(token in allowed)) for token in tokens]
    # Only `True`, `False`, `and`, `or` and parentheses.
    return bool(eval(" ".join(words)))


@functools.cache
def code_of(folder, kind):
    """The Rust code of a package that can name its dependencies of a kind: only development dependencies are for tests, benches and
    examples."""
    texts = []
    for path, folders, files in os.walk(folder):
        left_out = {"target", ".parts"} | ({"tests", "benches", "examples"} if kind is None else set())
        folders[:] = [name for name in folders if name not in left_out and not os.path.exists(f"{path}/{name}/Cargo.toml")]
        texts += [pathlib.Path(path, name).read_text() for name in files if name.endswith(".rs")]
    return "\n".join(texts)


def unused(package, library_names):
    """The dependencies of a package that its code does not name."""
    folder = os.path.dirname(package["manifest_path"])
    for dependency in package["dependencies"]:
        name = dependency["rename"] or dependency["name"]
        library = dependency["rename"] or library_names.get(name, name)
        library = library.replace("-", "_")
        # Not a module of this name: `crate::metrics::`.
        use = rf"(?<![\w:]){library}::|\b(use|extern crate) {library}\b"
        is_named = re.search(use, code_of(folder, dependency["kind"]))
        if not is_named and name not in WITHOUT_USE:
            yield f"{package['name']}: no code names its dependency {name} ({dependency['kind'] or 'normal'})"


def versions(lock):
    """The versions of each package in a lock file."""
    found = {}
    for package in tomllib.loads(pathlib.Path(lock).read_text())["package"]:
        found.setdefault(package["name"], set()).add(package["version"])
    return found


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
    library_names = {package["name"]: target["name"] for package in packages for target in package["targets"]
                     if set(target["kind"]) & {"lib", "proc-macro"}}
    command = ["cargo", "metadata", "--locked", "--no-deps", "--format-version=1", "--manifest-path=fuzz/Cargo.toml"]
    fuzz = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["packages"]
    for package in [package for package in packages if package["source"] is None] + fuzz:
        problems += unused(package, library_names)
    locked = versions("Cargo.lock")
    for name, found in versions("fuzz/Cargo.lock").items():
        if name in locked and not found <= locked[name]:
            problems.append(f"{name}: fuzz/Cargo.lock has {', '.join(found)}, and Cargo.lock {', '.join(locked[name])}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(packages)} packages have allowed licenses and sources, and the dependencies of this workspace are used")


if __name__ == "__main__":
    main()
