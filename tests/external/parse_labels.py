"""Reads pages of one metric with the parsers of the official client library of Prometheus: the values of its label are those of a
list. Usage: parse_labels.py VALUES.json TEXT OPENMETRICS"""

import json
import pathlib
import sys

from prometheus_client import parser as prometheus
from prometheus_client.openmetrics import parser as openmetrics

values, text, open_text = [pathlib.Path(argument).read_bytes().decode() for argument in sys.argv[1:]]
expected = sorted(json.loads(values))
for parser, page in [(prometheus, text), (openmetrics, open_text)]:
    [family] = parser.text_string_to_metric_families(page)
    found = sorted(sample.labels["value"] for sample in family.samples)
    assert found == expected, set(found) ^ set(expected)
