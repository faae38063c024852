"""Writes a container image as an OCI image layout, without a container engine.

The image has the gateway, the shared libraries that it needs, trusted authorities, and a user that is not root. It has no
shell and no package manager.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import pathlib
import platform
import subprocess
import tarfile

USER = 65532
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
FILES = {
    "/etc/passwd": f"root:x:0:0:root:/:/sbin/nologin\ntransom:x:{USER}:{USER}:transom:/:/sbin/nologin\n",
    "/etc/group": f"root:x:0:\ntransom:x:{USER}:\n",
    # The C library of the image has both of these built in.
    "/etc/nsswitch.conf": "hosts: files dns\n",
}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def shared_libraries(binary):
    """Paths of the libraries and of the loader, as the binary asks for them, with the real files."""
    # `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, `/lib64/ld-linux-x86-64.so.2 (0x…)`, and the kernel's own
    # library without a path.
    listed = subprocess.run(["ldd", binary], check=True, capture_output=True, text=True).stdout
    words = [word for line in listed.splitlines() for word in line.split()]
    return {word: pathlib.Path(word).resolve() for word in words if word.startswith("/")}


def copyright_files(libraries):
    """The copyright files of the Debian packages that own the libraries."""
    found = {}
    for library in libraries.values():
        owner = subprocess.run(["dpkg", "--search", str(library)], capture_output=True, text=True)
        if owner.returncode != 0:  # /usr and / are merged, and the package has the file without /usr.
            owner = subprocess.run(["dpkg", "--search", str(library).removeprefix("/usr")], check=True, capture_output=True, text=True)
        path = f"/usr/share/doc/{owner.stdout.split(':')[0]}/copyright"
        found[path] = pathlib.Path(path)
    return found


class Layout:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        (self.folder / "blobs/sha256").mkdir(parents=True)

    def add_blob(self, media_type, content):
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    def add_json(self, media_type, value):
        return self.add_blob(media_type, json.dumps(value, sort_keys=True).encode())

    def write(self, name, value):
        (self.folder / name).write_text(json.dumps(value, sort_keys=True))


def layer(files, epoch):
    """A layer as an uncompressed tar file: paths to contents and modes."""
    archive = io.BytesIO()
    folders = {str(parent) for path in files for parent in pathlib.PurePath(path).parents} - {"/"}
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted({*folders, *files}):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.mtime = epoch
            if path in files:
                content, entry.mode = files[path]
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
    return archive.getvalue()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ["--transom", "--config", "--version", "--layout"]:
        parser.add_argument(option, required=True)
    arguments = parser.parse_args()
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    created = subprocess.run(["date", "--utc", f"--date=@{epoch}", "+%Y-%m-%dT%H:%M:%SZ"], check=True, capture_output=True, text=True).stdout.strip()

    libraries = shared_libraries(arguments.transom)
    system = {path: (text.encode(), 0o644) for path, text in FILES.items()}
    system |= {path: (real.read_bytes(), 0o755) for path, real in libraries.items()}
    system |= {path: (real.read_bytes(), 0o644) for path, real in copyright_files(libraries).items()}
    system[AUTHORITIES] = (pathlib.Path(AUTHORITIES).read_bytes(), 0o644)
    gateway = {
        "/usr/bin/transom": (pathlib.Path(arguments.transom).read_bytes(), 0o755),
        "/etc/transom/gateway.toml": (pathlib.Path(arguments.config).read_bytes(), 0o644),
    }
    for license in ["LICENSE-APACHE", "LICENSE-MIT"]:
        gateway[f"/usr/share/doc/transom/{license}"] = (pathlib.Path(license).read_bytes(), 0o644)

    layout = Layout(arguments.layout)
    # The system changes rarely: in a layer of its own it is downloaded rarely.
    archives = [layer(files, epoch) for files in (system, gateway)]
    compressed = [gzip.compress(archive, 9, mtime=0) for archive in archives]
    layers = [layout.add_blob("application/vnd.oci.image.layer.v1.tar+gzip", content) for content in compressed]
    config = layout.add_json("application/vnd.oci.image.config.v1+json", {
        "created": created,
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {
            "User": f"{USER}:{USER}",
            "Entrypoint": ["/usr/bin/transom"],
            "Cmd": ["run", "--config", "/etc/transom/gateway.toml"],
            "WorkingDir": "/",
            "Env": ["PATH=/usr/bin"],
            "ExposedPorts": {"8080/tcp": {}, "9900/tcp": {}},
            "StopSignal": "SIGTERM",
            # Docker's extension of the format.
            "Healthcheck": {
                "Test": ["CMD", "/usr/bin/transom", "health", "--admin", "127.0.0.1:9900"],
                "Interval": 10_000_000_000,
                "Timeout": 3_000_000_000,
                "Retries": 3,
            },
            "Labels": {
                "org.opencontainers.image.title": "transom",
                "org.opencontainers.image.description": "Reverse-proxy gateway with exact, layered rate limits",
                "org.opencontainers.image.version": arguments.version,
                "org.opencontainers.image.licenses": "Apache-2.0 OR MIT",
                "org.opencontainers.image.created": created,
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(archive).hexdigest()}" for archive in archives]},
        "history": [
            {"created": created, "created_by": "shared libraries, trusted authorities"},
            {"created": created, "created_by": f"transom {arguments.version}"},
        ],
    })
    manifest = layout.add_json("application/vnd.oci.image.manifest.v1+json", {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config,
        "layers": layers,
    })
    manifest["annotations"] = {"org.opencontainers.image.ref.name": arguments.version}
    manifest["platform"] = {"architecture": ARCHITECTURES[platform.machine()], "os": "linux"}
    layout.write("index.json", {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest],
    })
    layout.write("oci-layout", {"imageLayoutVersion": "1.0.0"})


main()
