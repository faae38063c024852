"""Reads the metrics as Prometheus asks for them, with the parsers of the official client library: in both formats, with and
without gzip."""

import gzip
import sys
import urllib.request

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client import parser as prometheus

URL = sys.argv[1]
# What Prometheus 3 and Prometheus 2.30 send.
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2 = "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


def scrape(accept, encoding):
    fields = {"Accept": accept, "Accept-Encoding": encoding}
    with urllib.request.urlopen(urllib.request.Request(URL, headers=fields)) as response:
        body, head = response.read(), response.headers
    assert head["Vary"] == "Accept, Accept-Encoding", head
    assert head["Content-Encoding"] == ("gzip" if encoding == "gzip" else None), head
    return head["Content-Type"], (gzip.decompress(body) if encoding == "gzip" else body).decode()


def samples(families):
    """The values of all series that do not change from scrape to scrape."""
    found = {}
    for family in families:
        for sample in family.samples:
            if not sample.name.startswith(("process_", "transom_admin_", "transom_clock_", "transom_connections")):
                # The parsers read the bounds of buckets as text.
                assert found.setdefault((sample.name, *sorted(sample.labels.items())), sample.value) == sample.value
    return found


media_type, text = scrape(PROMETHEUS_3, "gzip")
assert media_type == OPEN, media_type
families = list(openmetrics.text_string_to_metric_families(text))
kinds = {family.name: family.type for family in families}
units = {family.name: family.unit for family in families}
assert kinds["transom_requests"] == "counter" and kinds["transom_request_duration_seconds"] == "histogram", kinds
assert units["transom_request_duration_seconds"] == "seconds" and units["transom_sent_bytes"] == "bytes", units
open_samples = samples(families)
assert len(open_samples) > 100, len(open_samples)

for accept, encoding in [(PROMETHEUS_2, "gzip"), ("*/*", "identity"), ("text/plain;version=0.0.4", "gzip")]:
    media_type, text = scrape(accept, encoding)
    assert media_type == TEXT, media_type
    text_families = list(prometheus.text_string_to_metric_families(text))
    assert {family.name: family.type for family in text_families} == kinds
    assert {family.name: family.documentation for family in text_families} == {
        family.name: family.documentation for family in families
    }
    assert samples(text_families) == open_samples
