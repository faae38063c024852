"""The load and what it is aimed at: wrk or h2load on one side, an nginx as upstream on the other.

Both run on a core of their own, away from the gateway that is measured. A load generator reports how
many answers came back and how many of them were 2xx; this file does not know who answered.
"""

import collections
import http.client
import json
import os
import re

import machine

CONNECTIONS = 64
PATH = "/api/hello"
# A small JSON answer of a hundred bytes: the gateway's own work is what is measured, not copying.
BODY = '{"message":"hello","from":"upstream","padding":"' + "x" * 49 + '"}\\n'

# Answers in all, answers with a status of 2xx, connections or requests that broke.
Outcome = collections.namedtuple("Outcome", "answers good broken seconds")


class Wrk:
    """wrk, one thread. A script adds up the counts; it has no hook per answer, which would be slow."""

    name, package = "wrk", "wrk"
    description = f"wrk, {CONNECTIONS} kept connections"
    SCRIPT = """
        done = function(summary)
            local e = summary.errors
            io.write(string.format('\\nOUTCOME {"answers":%d,"bad":%d,"broken":%d,"us":%d}\\n',
                summary.requests, e.status, e.connect + e.read + e.write + e.timeout, summary.duration))
        end
    """

    # Made beforehand; of so many that a connection does not meet the same twice in a row.
    VARIED = """
        local requests, next_one = {}, 0
        init = function()
            for each = 1, 1009 do
                requests[each] = wrk.format("GET", wrk.path .. "?" .. each)
            end
        end
        request = function()
            next_one = next_one % 1009 + 1
            return requests[next_one]
        end
    """

    def __init__(self, directory):
        self._script = os.path.join(directory, "count.lua")
        self._varied = os.path.join(directory, "varied.lua")
        for path, more in ((self._script, ""), (self._varied, self.VARIED)):
            with open(path, "w") as file:
                file.write(more + self.SCRIPT)

    def run(self, core, port, seconds, varied=False):
        """`varied`: no connection asks the same twice in a row."""
        script = self._varied if varied else self._script
        command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout", "5s", "-s", script]
        said = machine.run_on({core}, [*command, _url(port)], seconds + 15)
        found = re.search(r"^OUTCOME (.*)$", said, re.MULTILINE)
        if not found:
            raise machine.Trouble(f"wrk did not say how it went:\n{said}")
        counts = json.loads(found[1])
        good = counts["answers"] - counts["bad"]
        return Outcome(counts["answers"], good, counts["broken"], counts["us"] / 1e6)

    @staticmethod
    def probe(port):
        return probe(port)

    @staticmethod
    def version():
        # `wrk -v` prints its version and then, for want of a URL, fails.
        return machine.version_of(["wrk", "-v"], r"wrk (\S+)")


class H2load:
    """h2load speaking HTTP/1.1, one thread."""

    name, package = "h2load", "nghttp2-client"
    description = f"h2load, {CONNECTIONS} kept connections"
    options = ("--h1", f"-c{CONNECTIONS}")

    def __init__(self, directory):
        pass

    def run(self, core, port, seconds, varied=False):
        """As `Wrk.run`."""
        urls = [f"{_url(port)}?{each}" for each in range(7)] if varied else [_url(port)]
        command = ["h2load", *self.options, "-t1", f"-D{seconds}", *urls]
        said = machine.run_on({core}, command, seconds + 15)
        codes = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", said)
        broken = re.search(r"(\d+) errored, (\d+) timeout", said)
        if not codes or not broken:
            raise machine.Trouble(f"h2load did not say how it went:\n{said}")
        counts = [int(count) for count in codes.groups()]
        return Outcome(sum(counts), counts[0], sum(map(int, broken.groups())), seconds)

    @staticmethod
    def probe(port):
        return probe(port)

    @staticmethod
    def version():
        return machine.version_of(["h2load", "--version"], r"nghttp2/(\S+)")


class Http2(H2load):
    """h2load speaking HTTP/2 with prior knowledge, in the clear."""

    CONNECTIONS, STREAMS = 8, 32
    description = f"h2load, {CONNECTIONS} connections of HTTP/2 with {STREAMS} streams each"
    options = (f"-c{CONNECTIONS}", f"-m{STREAMS}")

    @staticmethod
    def probe(port):
        command = ["curl", "-sS", "--http2-prior-knowledge", "--max-time", "5", "--noproxy", "*", "-o", os.devnull]
        return int(machine.run_on(os.sched_getaffinity(0), [*command, "-w", "%{http_code}", _url(port)], 10))


GENERATORS = {generator.name: generator for generator in (Wrk, H2load)}


def _url(port):
    return f"http://{machine.LOOPBACK}:{port}{PATH}"


def probe(port, path=PATH):
    """One request on its own connection: its status."""
    connection = http.client.HTTPConnection(machine.LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException) as error:
        raise machine.Trouble(f"no answer on port {port}: {error}") from error
    finally:
        connection.close()


def start_upstream(directory, core):
    """An nginx that answers every request itself, with connections that are never closed."""
    port = machine.free_port()
    prefix = os.path.join(directory, "upstream")
    config = f"""
        http {{
            access_log off;
            keepalive_requests 1000000000;
            keepalive_timeout 1h;
            server {{
                listen {machine.LOOPBACK}:{port} backlog=1024;
                default_type application/json;
                return 200 '{BODY}';
            }}
        }}
    """
    command = nginx_command(prefix, config)
    return machine.Server("the upstream", command, port, os.path.join(prefix, "log"), {core}), port


def nginx_command(prefix, http_block, connections=4096):
    """How to run an nginx, one worker, that touches nothing of an nginx installed on the system."""
    os.makedirs(prefix, exist_ok=True)
    temporary = "\n".join(
        f"{kind}_temp_path {prefix}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = os.path.join(prefix, "nginx.conf")
    with open(config, "w") as file:
        file.write(
            # Started by root, nginx would hand its worker to `nobody`, who cannot use the prefix.
            ("user root;\n" if os.geteuid() == 0 else "")
            + f"daemon off;\nworker_processes 1;\npid {prefix}/pid;\nerror_log stderr crit;\n"
            + f"events {{ worker_connections {connections}; }}\n"
            + http_block.replace("http {", "http {\n" + temporary, 1)
        )
    return ["nginx", "-p", prefix, "-e", "stderr", "-c", config]
