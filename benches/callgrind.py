"""Counts the instructions of a gateway per request, with callgrind.

A gateway that serves N requests is compared with one that serves 2 N: the difference is that of N requests without the start
and the end. One connection sends one request after the other, so that each takes the same steps. Counts hardly depend on
other work of the machine.
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


def per_request(binary, directory, upstream_port, paths, requests, more="", http="--h1", status=2, scenario=gateways.FORWARDING,
                cores=frozenset({CORE}), connections=1, runs=1):
    """Returns the instructions per request. Appends `more` to the configuration. `status` is the first digit of the expected
    status. `cores` are those of the gateway, which has a worker for each. Of several `runs`, the least counts are taken."""
    urls = os.path.join(directory, "urls")

    def total(requests):
        server, port = gateways.Transom(binary, COMMAND).start(
            directory, upstream_port, scenario, cores, more=more
        )
        with server:
            with open(urls, "w") as file:
                file.writelines(f"http://{machine.LOOPBACK}:{port}{path}\n" for path in paths)
            command = ["h2load", http, f"-c{connections}", "-t1", f"-n{requests}", "-i", urls]
            output = machine.run_on({CORE}, command, 600)
            done = re.search(rf"status codes:.* (\d+) {status}xx", output)
            if not done or int(done[1]) < requests - 10:
                raise BenchmarkError(f"not all of {requests} responses have status {status}xx:\n{output}")
            server.end(60)
            return collected(server.output())

    least = {count: min(total(count) for _ in range(runs)) for count in (requests, 2 * requests)}
    return (least[2 * requests] - least[requests]) / requests


def collected(output):
    """Returns the count that callgrind prints at its end."""
    counted = re.search(r"Collected : (\d+)", output)
    if not counted:
        raise BenchmarkError(f"valgrind counted nothing:\n{output}")
    return int(counted[1])
