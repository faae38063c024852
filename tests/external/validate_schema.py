"""Validates TOML files against a JSON schema: validate_schema.py SCHEMA FILE...

Prints a line per file: its name, a tab, and `valid`, `not TOML`, or the first error.
"""

import json
import sys
import tomllib

import jsonschema


def to_json(value):
    """TOML as JSON: dates and times are strings."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else value.isoformat()


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        schema = json.load(file)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name in sys.argv[2:]:
        try:
            with open(name, "rb") as file:
                document = to_json(tomllib.load(file))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            print(name, "not TOML", sep="\t")
            continue
        error = jsonschema.exceptions.best_match(validator.iter_errors(document))
        print(name, "valid" if error is None else f"{error.json_path}: {error.message}"[:200], sep="\t")


if __name__ == "__main__":
    main()
