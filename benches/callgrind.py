"""Counts the instructions of a gateway per request, with callgrind.

callgrind counts while a gateway serves N requests on new connections, after as many that are not counted. One connection sends one request after the
other, so that each takes the same steps. Counts hardly depend on other work of the machine.
"""

import os
import re

import gateways
import machine
from machine import BenchmarkError

# One core, so that the gateway has one worker, and waits for the client in the same places each time: where the two run at
# once, a request sometimes arrives before the gateway has looked for it.
CORE = min(os.sched_getaffinity(0))
COMMAND = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]


class Valgrind:
    name, package = "valgrind", "valgrind"

    @staticmethod
    def version():
        return machine.version_of(["valgrind", "--version"], r"valgrind-(\S+)")


class CountedGateway:
    """A gateway under callgrind."""

    def __init__(self, binary, directory, upstream_port, more="", scenario=gateways.FORWARDING, cores=frozenset({CORE})):
        """Appends `more` to the configuration. `cores` are those of the gateway, which has a worker for each."""
        self._directory = directory
        self._dumps = os.path.join(directory, "callgrind")
        self._dumped = 0
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={self._dumps}"]
        self._server, self._port = gateways.Transom(binary, command).start(
            directory, upstream_port, scenario, cores, more=more
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stop()

    def per_request(self, paths, requests, http="--h1", status=2, connections=1, runs=1):
        """Returns the instructions per request. `status` is the first digit of the expected status. Of several `runs`, the
        least count is taken."""
        urls = os.path.join(self._directory, "urls")
        with open(urls, "w") as file:
            file.writelines(f"http://{machine.LOOPBACK}:{self._port}{path}\n" for path in paths)
        command = ["h2load", http, f"-c{connections}", "-t1", f"-n{requests}", "-i", urls]

        def send():
            output = machine.run_on({CORE}, command, 600)
            done = re.search(rf"status codes:.* (\d+) {status}xx", output)
            if not done or int(done[1]) < requests - 10:
                raise BenchmarkError(f"not all of {requests} responses have status {status}xx:\n{output}")

        # The first requests open connections to the server, and counters.
        send()
        counts = []
        for _ in range(runs):
            self._collected()
            send()
            counts.append(self._collected())
        return min(counts) / requests

    def _collected(self):
        """Returns the instructions since the last call."""
        machine.run_on({CORE}, ["vgdb", f"--pid={self._server.pid}", "dump"], 60)
        self._dumped += 1
        with open(f"{self._dumps}.{self._dumped}") as file:
            totals = re.search(r"^totals: (\d+)", file.read(), re.MULTILINE)
        if not totals:
            raise BenchmarkError(f"{file.name} has no count")
        return int(totals[1])


def collected(output):
    """Returns the count that callgrind prints at its end."""
    counted = re.search(r"Collected : (\d+)", output)
    if not counted:
        raise BenchmarkError(f"valgrind counted nothing:\n{output}")
    return int(counted[1])
