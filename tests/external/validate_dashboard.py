"""Checks the dashboard of deploy/grafana.json: Grafana's own types read it completely. What they do not know is lost when they
write it again."""

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(written, read, path):
    """The paths of what was written and not read, or read as something else."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            if key in read:
                yield from lost(value, read[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for position, pair in enumerate(zip(written, read)):
            yield from lost(*pair, f"{path}[{position}]")
    elif written != read:
        yield f"{path}: {written!r} is read as {read!r}"


register_default_plugins()
with open(sys.argv[1]) as file:
    dashboard = json.load(file)
read = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
assert len(read["panels"]) >= 20
problems = list(lost(dashboard, read, "dashboard"))
assert not problems, problems
# The check finds what Grafana does not know.
dashboard["panels"][1]["fieldConfigs"] = {}
assert list(lost(dashboard, read, "dashboard")) == ["dashboard.panels[1].fieldConfigs"]
