"""Turns, rounds and reports of the programs that measure gateways on the same machine in the same run.

Each gateway has one worker and core 0 to itself; the load generator and the upstream share core 1. They
take turns, in an order that changes from round to round, so that a machine that gets slower or is
disturbed favours none of them. Ratios are formed within a round, never across rounds. A run with
unexpected responses ends the benchmark instead of entering the table.

Programs compare CPU time per request instead of requests per second, because CPU time does not depend on
the speed of the load generator or the upstream, and because it is what a user pays for.
"""

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import namedtuple

import gateways
import load_generators
import machine
from machine import BenchmarkError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Built by `make release` with a profile, and by `cargo build --release` without one.
OPTIMIZED, PLAIN = (os.path.join(ROOT, "target", profile, "transom") for profile in ("dist", "release"))
BUILT_BY = {OPTIMIZED: "make release", PLAIN: "cargo build --release"}
# Load before each turn, and how long keys are sent at a time until all were.
WARM_UP_S, KEYS_S = 1, 5
# The share of responses that must have the status of the scenario.
PURITY = 0.999
# Descriptors for other things than connections.
EXTRA_DESCRIPTORS = 1_500
MIB = 1024 * 1024

# One turn of one gateway: CPU time of a request, its part in user mode, and responses a second. `others` is the share of its
# core that other processes used.
Turn = namedtuple("Turn", "cpu_us user_us rate busy others memory_mib")


def run(measure, options):
    """Runs `measure` with a temporary directory and a report. Prints errors, and leaves nothing behind."""
    # SIGTERM unwinds like Ctrl-C, so that all processes are stopped and all files removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="transom-bench-") as directory:
            report = Report()
            measure(options, directory, report)
            if getattr(options, "results", None):
                with open(options.results, "w") as file:
                    file.write(report.markdown())
    except BenchmarkError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def plain_argument(parser):
    parser.add_argument("--plain", default=PLAIN, metavar="PATH", help="the gateway built without a profile")


def common_arguments(parser):
    parser.add_argument("--transom", default=OPTIMIZED, metavar="PATH", help="the gateway (default: built by `make release`)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each gateway per scenario (default 6)")
    parser.add_argument("--seconds", type=int, default=3, help="load per turn (default 3)")
    parser.add_argument("--server-core", type=int, default=0, help="core of the gateways (default 0)")
    parser.add_argument("--load-core", type=int, default=1, help="core of load and upstream (default 1)")
    parser.add_argument("--results", metavar="FILE", help="also write the figures as Markdown")


def checked(parser):
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds < 1:
        parser.error("`--rounds` and `--seconds` are at least 1")
    return options


def begin(options, report, compared, generator):
    require_all(options, [*compared, generator])
    versions = [(each.name, each.version()) for each in (*compared, generator)]
    report.machine(machine.description(versions), options, generator)


def compare(options, directory, report, scenario, compared, generator, upstream_port):
    """All rounds of one scenario."""
    rounds = []
    for number in range(options.rounds):
        rounds.append({})
        for gateway in in_turn(compared, number):
            server, port = gateway.start(directory, upstream_port, scenario, {options.server_core})
            with server:
                rounds[-1][gateway.name] = take_turn(server, port, scenario, generator, options)
        report.round(scenario, number, rounds[-1])
    report.scenario(scenario, rounds)


def in_turn(compared, number):
    """A B C, B C A, C A B and then the same backwards."""
    start = number % len(compared)
    order = compared[start:] + compared[:start]
    return order[::-1] if number // len(compared) % 2 else order


def take_turn(server, port, scenario, generator, options):
    # Warms caches and opens upstream connections; in the refusing scenarios this also uses up the limit.
    warmed = generator.run(options.load_core, port, WARM_UP_S, scenario).responses
    while warmed < scenario.keys:
        warmed += responses(server, scenario, generator.run(options.load_core, port, KEYS_S, scenario)).responses
    expect(server, port, scenario, generator)
    core_before, before, start = machine.core_busy_s(options.server_core), server.cpu_times_s(), time.monotonic()
    outcome = responses(server, scenario, generator.run(options.load_core, port, options.seconds, scenario))
    wall_s = time.monotonic() - start
    user_s, system_s = (after - before for before, after in zip(before, server.cpu_times_s()))
    cpu_s, core_s = user_s + system_s, machine.core_busy_s(options.server_core) - core_before
    expect(server, port, scenario, generator)
    wanted = outcome.responses - outcome.ok if scenario.limits else outcome.ok
    if wanted < PURITY * outcome.responses or outcome.failed > (1 - PURITY) * outcome.responses:
        raise BenchmarkError(
            f"{server.name}, {scenario.name}: of {outcome.responses} responses {outcome.ok} were 2xx, "
            f"{outcome.failed} failed; its output:\n{server.output()}"
        )
    return Turn(
        cpu_us=cpu_s / outcome.responses * 1e6,
        user_us=user_s / outcome.responses * 1e6,
        rate=outcome.responses / outcome.seconds,
        busy=cpu_s / wall_s,
        others=max(0.0, core_s - cpu_s) / wall_s,
        memory_mib=server.memory_mib(),
    )


def responses(server, scenario, outcome):
    """Returns the outcome, which has responses."""
    if outcome.responses == 0:
        raise BenchmarkError(f"{server.name}, {scenario.name}: no response; its output:\n{server.output()}")
    return outcome


def expect(server, port, scenario, generator):
    """Checks the exact status: the load generators only count classes of statuses."""
    # A window may just have ended; the first requests of the next one are then admitted.
    for _ in range(50):
        status = generator.probe(port, scenario)
        if status == scenario.status:
            return
    raise BenchmarkError(f"{server.name}, {scenario.name}: status {status}, expected {scenario.status}")


def require_all(options, tools):
    """Fails unless all needed programs are installed; a gap in the table would look like a result."""
    require(options.transom, tools)
    if "plain" in options:
        require(options.plain, [])
    cores = {options.server_core, options.load_core}
    if len(cores) < 2 or not cores <= os.sched_getaffinity(0):
        raise BenchmarkError("needs two cores, one for the gateways and another for the load; see --server-core, --load-core")


def require(transom, tools):
    missing = sorted({
        tool.package
        for tool in tools
        if tool.package and not shutil.which(getattr(tool, "program", tool.name))
    })
    if missing:
        raise BenchmarkError(f"missing programs; install them with:\n    apt-get install -y {' '.join(missing)}")
    if not os.access(transom, os.X_OK):
        how = BUILT_BY.get(os.path.abspath(transom))
        raise BenchmarkError(f"`{transom}` does not exist" + (f"; build it with:\n    {how}" if how else ""))


class Report:
    """Prints tables and facts, and keeps them as Markdown."""

    def __init__(self):
        self._lines = []

    def _say(self, text=""):
        print(text, flush=True)
        self._lines.append(text)

    def markdown(self):
        return "\n".join(self._lines) + "\n"

    def table(self, head, rows):
        widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
        for number, row in enumerate([head, *rows]):
            cells = [text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths))]
            self._say("| " + " | ".join(cells) + " |")
            if number == 0:
                rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
                self._say("| " + " | ".join(rules) + " |")
        self._say()

    def facts(self, facts):
        for what, which in facts:
            self._say(f"- {what}: {which}")
        self._say()

    def section(self, title):
        self._say(f"### {title}")
        self._say()

    def machine(self, facts, options, generator):
        how = (
            f"{generator.description}, {options.rounds} rounds of "
            f"{options.seconds} s per gateway; gateways on core {options.server_core}, "
            f"load and upstream on core {options.load_core}"
        )
        self.facts([*facts, ("load", how)])

    def round(self, scenario, number, turns):
        """Prints progress on the terminal only."""
        figures = ", ".join(f"{name} {turn.cpu_us:.2f}" for name, turn in turns.items())
        print(f"  {scenario.name}, round {number + 1}: {figures} µs", file=sys.stderr, flush=True)

    def scenario(self, scenario, rounds):
        self.section(f"{scenario.name.capitalize()}: CPU time per request")
        rows = []
        for name in sorted(rounds[0], key=lambda name: name != "transom"):
            turns = [turns[name] for turns in rounds]

            def median(field):
                return statistics.median(getattr(turn, field) for turn in turns)

            rows.append([
                name, f"{median('cpu_us'):.2f}", f"{median('rate'):,.0f}", f"{median('busy'):.0%}",
                f"{max(turn.others for turn in turns):.0%}", f"{max(turn.memory_mib for turn in turns):.1f}",
            ])
        self.table(
            ["gateway", "median µs", "requests/s", "core used", "core lost to others, worst", "MiB after load"], rows
        )
        rows = []
        for other in (name for name in rounds[0] if name != "transom"):
            ratios = sorted(turns["transom"].cpu_us / turns[other].cpu_us for turns in rounds)
            middle, target = statistics.median(ratios), scenario.targets.get(other)
            verdict = "no target" if target is None else f"≤ {target:.2f}: {met(middle <= target)}"
            rows.append([f"transom / {other}", f"{ratios[0]:.2f}", f"{middle:.2f}", f"{ratios[-1]:.2f}", verdict])
        self.table(["ratio, round by round", "min", "median", "max", "target"], sorted(rows, reverse=True))


def met(is_met):
    return "met" if is_met else "missed"
