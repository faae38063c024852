"""Validates the OpenAPI document of an admin address, and calls its endpoints with generated requests (schemathesis): each response must be
one that the document describes, and none a failure of the server.

    call_admin_api.py http://HOST:PORT NAMES

NAMES is JSON: for names of fields and parameters, the values that exist at the gateway, so that requests reach what they ask for.
Fields of responses that the document lacks are failures here, although clients have to ignore them.
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from openapi_spec_validator import validate

# Never ends.
STREAM = "/v1/events"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def constrain(part, names):
    """Lets requests name what exists, and forbids undocumented fields."""
    if isinstance(part, list):
        for item in part:
            constrain(item, names)
    if not isinstance(part, dict):
        return
    properties = part.get("properties")
    if isinstance(properties, dict):
        part["additionalProperties"] = False
        if part.get("x-request"):
            for name in properties.keys() & names.keys():
                properties[name] = {"enum": names[name]}
    if part.get("in") in ("path", "header") and part["name"] in names:
        part["schema"] = {"type": "string", "enum": names[part["name"]]}
    for value in list(part.values()):
        constrain(value, names)


def main():
    url, names = sys.argv[1], json.loads(sys.argv[2])
    with urllib.request.urlopen(f"{url}/v1/openapi.json") as response:
        document = json.load(response)
    validate(document)
    closed = document["components"]["schemas"]
    for schema in closed.values():
        # Only objects of requests are closed in the document.
        schema["x-request"] = schema.get("additionalProperties") is False
    constrain(document, names)
    described = Path("openapi.json")
    described.write_text(json.dumps(document))
    command = [Path(sys.executable).parent / "schemathesis", "run", described, "--url", url, "--exclude-path", STREAM]
    command += ["--checks", CHECKS, "--seed", "1", "--max-examples", "20", "--generation-database", "none"]
    sys.exit(subprocess.run(command + ["--no-color", "--warnings", "off"], check=False).returncode)


main()
