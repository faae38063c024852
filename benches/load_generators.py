"""The load generators (wrk or h2load), and nginx as upstream.

Load generator and upstream share a core; the gateway has another. A load generator reports the number of
responses, and how many of them were 2xx.
"""

import collections
import concurrent.futures
import http.client
import json
import os
import re
import socket
import ssl
import time

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


class Curl:
    name = package = "curl"


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

    # Numbers in place of the asterisk of a request. The stride has no divisor in common with any count in use, so that each
    # number comes once, in no simple order.
    NUMBERED = """
        local before, after, number, count
        init = function(args)
            before, after = wrk.format():match("^(.-)%*(.*)$")
            number, count = tonumber(args[1]), tonumber(args[2])
        end
        request = function()
            number = (number + 7919) % count
            return before .. number .. after
        end
    """

    def __init__(self, directory):
        self._script = os.path.join(directory, "count.lua")
        self._numbered = os.path.join(directory, "numbered.lua")
        self._sent = 0
        for path, more in ((self._script, ""), (self._numbered, self.NUMBERED)):
            with open(path, "w") as file:
                file.write(more + self.SCRIPT)

    def run(self, core, port, seconds, scenario):
        script = self._script if scenario.count == 1 else self._numbered
        command = ["wrk", "-t1", f"-c{scenario.connections or CONNECTIONS}", f"-d{seconds}s", "--timeout", "5s", "-s", script]
        command += [part for field in scenario.fields for part in ("-H", field)]
        # Goes on with the numbers where the last run ended.
        numbers = ["--", str(self._sent * 7919 % scenario.count), str(scenario.count)]
        output = machine.run_on({core}, [*command, _url(port, scenario, PATH), *numbers], seconds + 15)
        found = re.search(r"^OUTCOME (.*)$", output, re.MULTILINE)
        if not found:
            raise machine.BenchmarkError(f"no result from wrk:\n{output}")
        counts = json.loads(found[1])
        self._sent += counts["responses"]
        ok = counts["responses"] - counts["bad"]
        return Outcome(counts["responses"], ok, counts["failed"], counts["us"] / 1e6)

    @staticmethod
    def probe(port, scenario):
        return curl(["--http1.1"], _url(port, scenario, PATH), scenario)

    @staticmethod
    def version():
        # `wrk -v` prints its version and then fails, because it has no URL.
        return machine.version_of(["wrk", "-v"], r"wrk (\S+)")


class H2load:
    """h2load with HTTP/1.1, one thread."""

    name, package = "h2load", "nghttp2-client"
    description = "h2load with kept connections"
    options, connections, path = ("--h1",), CONNECTIONS, PATH
    curl_options = ("--http1.1",)
    # The longest list of URLs, and the part of a constant rate that must have been served.
    MOST_URLS, HELD = 10_000, 0.97

    def __init__(self, directory):
        self._directory = directory

    def run(self, core, port, seconds, scenario, more=()):
        """Appends `more` to the options."""
        urls = os.path.join(self._directory, "urls")
        with open(urls, "w") as file:
            for number in range(min(scenario.count, self.MOST_URLS)):
                file.write(_url(port, scenario, self.path).replace("*", str(number)) + "\n")
        command = ["h2load", *self.options, f"-c{scenario.connections or self.connections}", "-t1", f"-D{seconds}", *more]
        output = machine.run_on({core}, [*command, *(f"-H{field}" for field in scenario.fields), "-i", urls], seconds + 15)
        codes = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output)
        failed = re.search(r"(\d+) errored, (\d+) timeout", output)
        if not codes or not failed:
            raise machine.BenchmarkError(f"no result from h2load:\n{output}")
        counts = [int(count) for count in codes.groups()]
        return Outcome(sum(counts), counts[0], sum(map(int, failed.groups())), seconds)

    def latencies(self, core, port, seconds, scenario, rate):
        """Sends `rate` requests a second, and returns the times of all responses in ms, sorted; none if
        there were fewer responses.

        A connection that waits for a response sends its next request late. The times that late requests would have waited
        are added, as HdrHistogram does: of a response that took more than the interval of a connection, also that time less
        one interval, less two, and so on.
        """
        log = os.path.join(self._directory, "times")
        if os.path.exists(log):
            os.remove(log)
        connections = scenario.connections or self.connections
        self.run(core, port, seconds, scenario, [f"--rps={rate / connections:.3f}", f"--log-file={log}"])
        with open(log) as file:
            measured = [int(line.split("\t")[2]) / 1e3 for line in file]
        if len(measured) < self.HELD * rate * seconds:
            return []
        interval = connections / rate * 1e3
        return sorted(ms - late * interval for ms in measured for late in range(1 + int(ms / interval)))

    def probe(self, port, scenario):
        return curl(self.curl_options, _url(port, scenario, self.path), scenario)

    @staticmethod
    def version():
        return machine.version_of(["h2load", "--version"], r"nghttp2/(\S+)")


class Http2(H2load):
    """h2load with HTTP/2, prior knowledge, without TLS."""

    CONNECTIONS, STREAMS = 8, 32
    description = f"h2load, {CONNECTIONS} connections of HTTP/2 with {STREAMS} streams each"
    options, connections = (f"-m{STREAMS}",), CONNECTIONS
    curl_options = ("--http2-prior-knowledge",)


class Handshakes:
    """A new connection for each request, with a full handshake: wrk and h2load resume sessions."""

    THREADS = 8
    REQUEST = f"GET {PATH} HTTP/1.1\r\nHost: {machine.LOOPBACK}\r\nConnection: close\r\n\r\n".encode()

    def __init__(self, _directory):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3

    def run(self, core, port, seconds, _scenario):
        start = time.monotonic()

        def connect_repeatedly(_):
            # Of this thread.
            os.sched_setaffinity(0, {core})
            counts = collections.Counter()
            while time.monotonic() < start + seconds:
                counts[self._status(port)] += 1
            return counts

        with concurrent.futures.ThreadPoolExecutor(self.THREADS) as pool:
            counts = sum(pool.map(connect_repeatedly, range(self.THREADS)), collections.Counter())
        failed = counts.pop(None, 0)
        return Outcome(sum(counts.values()), counts[200], failed, time.monotonic() - start)

    def _status(self, port):
        """Returns the status of one request, or nothing if it failed."""
        try:
            with self._context.wrap_socket(socket.create_connection((machine.LOOPBACK, port), timeout=5)) as connection:
                connection.sendall(self.REQUEST)
                response = b""
                while piece := connection.recv(65536):
                    response += piece
                return int(response.split(b" ", 2)[1])
        except (OSError, IndexError, ValueError):
            return None

    @staticmethod
    def probe(port, scenario):
        return Wrk.probe(port, scenario)


ALL = (Wrk, H2load, Http2, Handshakes)


def _url(port, scenario, path):
    scheme = "https" if "tls" in scenario.needs else "http"
    return f"{scheme}://{machine.LOOPBACK}:{port}{scenario.path or path}"


def curl(options, url, scenario):
    """Sends one request on a new connection and returns its status."""
    command = ["curl", "-sSk", *options, "--max-time", "5", "--noproxy", "*", "-o", os.devnull, "-w", "%{http_code}"]
    command += [part for field in scenario.fields for part in ("-H", field)]
    return int(machine.run_on(os.sched_getaffinity(0), [*command, url.replace("*", "0")], 10))


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


def nginx_command(prefix, http_block, connections=4096, modules=()):
    """Returns the command of an nginx with one worker that is independent of the system's nginx."""
    os.makedirs(prefix, exist_ok=True)
    temporary = "\n".join(
        f"{kind}_temp_path {prefix}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = os.path.join(prefix, "nginx.conf")
    with open(config, "w") as file:
        file.write(
            # As root, nginx would run its worker as user `nobody`, which cannot use the prefix.
            "".join(f"load_module {module};\n" for module in modules)
            + ("user root;\n" if os.geteuid() == 0 else "")
            + f"daemon off;\nworker_processes 1;\npid {prefix}/pid;\nerror_log stderr crit;\n"
            + f"events {{ worker_connections {connections}; }}\n"
            + http_block.replace("http {", "http {\n" + temporary, 1)
        )
    return ["nginx", "-p", prefix, "-e", "stderr", "-c", config]
