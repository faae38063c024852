"""The load generators (wrk or h2load), and nginx as upstream.

Load generator and upstream share a core; the gateway has another. A load generator reports the number of
responses, and how many of them were 2xx.
"""

import collections
import http.client
import json
import os
import re

import machine

CONNECTIONS = 64
# Connections that nginx has memory for, where there may be very many.
MANY = 32_768
PATH = "/api/hello"
# A response of one MiB.
LARGE_PATH = "/api/large"
LARGE_BYTES = 1024 * 1024
# A small JSON response of a hundred bytes: the benchmark measures the gateway's work, not copying.
BODY = '{"message":"hello","from":"upstream","padding":"' + "x" * 49 + '"}\\n'

# All responses, responses with a 2xx status, failed connections or requests.
Outcome = collections.namedtuple("Outcome", "responses ok failed seconds")


class Wrk:
    """wrk, one thread. A script adds up the counts, without a hook per response, which would be slow."""

    name, package = "wrk", "wrk"
    description = "wrk with kept connections"
    SCRIPT = """
        done = function(summary)
            local e = summary.errors
            io.write(string.format('\\nOUTCOME {"responses":%d,"bad":%d,"failed":%d,"us":%d}\\n',
                summary.requests, e.status, e.connect + e.read + e.write + e.timeout, summary.duration))
        end
    """

    # Created in advance, and enough that no connection sends the same request twice in a row.
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

    def run(self, core, port, seconds, varied=False, connections=None, path=None):
        """With `varied`, no connection sends the same request twice in a row."""
        script = self._varied if varied else self._script
        command = ["wrk", "-t1", f"-c{connections or CONNECTIONS}", f"-d{seconds}s", "--timeout", "5s", "-s", script]
        output = machine.run_on({core}, [*command, _url(port, path or PATH)], seconds + 15)
        found = re.search(r"^OUTCOME (.*)$", output, re.MULTILINE)
        if not found:
            raise machine.BenchmarkError(f"no result from wrk:\n{output}")
        counts = json.loads(found[1])
        ok = counts["responses"] - counts["bad"]
        return Outcome(counts["responses"], ok, counts["failed"], counts["us"] / 1e6)

    @staticmethod
    def probe(port):
        return probe(port)

    @staticmethod
    def version():
        # `wrk -v` prints its version and then fails, because it has no URL.
        return machine.version_of(["wrk", "-v"], r"wrk (\S+)")


class H2load:
    """h2load with HTTP/1.1, one thread."""

    name, package = "h2load", "nghttp2-client"
    description = "h2load with kept connections"
    options, connections, path = ("--h1",), CONNECTIONS, PATH

    def __init__(self, directory):
        pass

    def run(self, core, port, seconds, varied=False, connections=None, path=None):
        """See `Wrk.run`."""
        url = _url(port, path or self.path)
        urls = [f"{url}?{each}" for each in range(7)] if varied else [url]
        command = ["h2load", *self.options, f"-c{connections or self.connections}", "-t1", f"-D{seconds}", *urls]
        output = machine.run_on({core}, command, seconds + 15)
        codes = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output)
        failed = re.search(r"(\d+) errored, (\d+) timeout", output)
        if not codes or not failed:
            raise machine.BenchmarkError(f"no result from h2load:\n{output}")
        counts = [int(count) for count in codes.groups()]
        return Outcome(sum(counts), counts[0], sum(map(int, failed.groups())), seconds)

    @staticmethod
    def probe(port):
        return probe(port)

    @staticmethod
    def version():
        return machine.version_of(["h2load", "--version"], r"nghttp2/(\S+)")


class Http2(H2load):
    """h2load with HTTP/2, prior knowledge, without TLS."""

    CONNECTIONS, STREAMS = 8, 32
    description = f"h2load, {CONNECTIONS} connections of HTTP/2 with {STREAMS} streams each"
    options, connections = (f"-m{STREAMS}",), CONNECTIONS

    @staticmethod
    def probe(port):
        command = ["curl", "-sS", "--http2-prior-knowledge", "--max-time", "5", "--noproxy", "*", "-o", os.devnull]
        return int(machine.run_on(os.sched_getaffinity(0), [*command, "-w", "%{http_code}", _url(port)], 10))


GENERATORS = {generator.name: generator for generator in (Wrk, H2load)}


def _url(port, path=PATH):
    return f"http://{machine.LOOPBACK}:{port}{path}"


def probe(port, path=PATH):
    """Sends one request on a new connection and returns its status."""
    connection = http.client.HTTPConnection(machine.LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException) as error:
        raise machine.BenchmarkError(f"no response at port {port}: {error}") from error
    finally:
        connection.close()


def start_upstream(directory, core):
    """Starts an nginx that responds to every request itself and never closes connections."""
    port = machine.free_port()
    prefix = os.path.join(directory, "upstream")
    files = os.path.join(prefix, "files", "api")
    os.makedirs(files)
    with open(os.path.join(files, os.path.basename(LARGE_PATH)), "wb") as file:
        file.write(os.urandom(LARGE_BYTES))
    config = f"""
        http {{
            access_log off;
            keepalive_requests 1000000000;
            keepalive_timeout 1h;
            server {{
                listen {machine.LOOPBACK}:{port} backlog=1024;
                default_type application/json;
                location / {{
                    return 200 '{BODY}';
                }}
                location = {LARGE_PATH} {{
                    root {os.path.dirname(files)};
                    sendfile on;
                }}
            }}
        }}
    """
    command = nginx_command(prefix, config, MANY)
    return machine.Server("the upstream", command, port, os.path.join(prefix, "log"), {core}), port


def nginx_command(prefix, http_block, connections=4096):
    """Returns the command of an nginx with one worker that is independent of the system's nginx."""
    os.makedirs(prefix, exist_ok=True)
    temporary = "\n".join(
        f"{kind}_temp_path {prefix}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = os.path.join(prefix, "nginx.conf")
    with open(config, "w") as file:
        file.write(
            # As root, nginx would run its worker as user `nobody`, which cannot use the prefix.
            ("user root;\n" if os.geteuid() == 0 else "")
            + f"daemon off;\nworker_processes 1;\npid {prefix}/pid;\nerror_log stderr crit;\n"
            + f"events {{ worker_connections {connections}; }}\n"
            + http_block.replace("http {", "http {\n" + temporary, 1)
        )
    return ["nginx", "-p", prefix, "-e", "stderr", "-c", config]
