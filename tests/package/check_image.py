"""Checks an OCI image layout: all digests and sizes, and what the configuration promises."""

import gzip
import hashlib
import json
import pathlib
import sys
import tarfile
import io

layout = pathlib.Path(sys.argv[1])
used = set()


def blob(descriptor):
    algorithm, digest = descriptor["digest"].split(":")
    assert algorithm == "sha256"
    content = (layout / "blobs/sha256" / digest).read_bytes()
    assert hashlib.sha256(content).hexdigest() == digest and len(content) == descriptor["size"], descriptor
    used.add(digest)
    return content


assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
index = json.loads((layout / "index.json").read_text())
(described,) = index["manifests"]
manifest = json.loads(blob(described))
config = json.loads(blob(manifest["config"]))
archives = [gzip.decompress(blob(layer)) for layer in manifest["layers"]]
diff_ids = [f"sha256:{hashlib.sha256(archive).hexdigest()}" for archive in archives]
assert config["rootfs"] == {"type": "layers", "diff_ids": diff_ids}
assert len(config["history"]) == len(archives)
assert used == {path.name for path in (layout / "blobs/sha256").iterdir()}

run = config["config"]
assert run["User"] not in ("", "0", "root") and not run["User"].startswith("0:")
assert run["Entrypoint"] == ["/usr/bin/transom"] and run["Cmd"][0] == "run"
assert run["Healthcheck"]["Test"][:3] == ["CMD", "/usr/bin/transom", "health"]
assert set(run["ExposedPorts"]) == {"8080/tcp", "9900/tcp"}
assert run["Labels"]["org.opencontainers.image.version"] == described["annotations"]["org.opencontainers.image.ref.name"]

entries = [entry for archive in archives for entry in tarfile.open(fileobj=io.BytesIO(archive)).getmembers()]
paths = [entry.name for entry in entries if entry.isfile()]
assert len(paths) == len(set(paths))
assert {"usr/bin/transom", "etc/transom/gateway.toml", "etc/ssl/certs/ca-certificates.crt"} <= set(paths), paths
for entry in entries:
    assert (entry.uid, entry.gid) == (0, 0) and not entry.mode & 0o7022, entry.name
print(f"{len(paths)} files, {sum(map(len, archives)) / 1e6:.1f} MB, compressed {sum(layer['size'] for layer in manifest['layers']) / 1e6:.1f} MB")
