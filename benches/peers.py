#!/usr/bin/env python3
"""Measures the CPU time of a request, its latency, and memory, of Transom and other gateways in the same run.

    python3 benches/peers.py                       # about an hour
    python3 benches/peers.py --rounds 1 --seconds 1 --scenario forwarding --peer nginx
    python3 benches/peers.py --results benches/peers.md --chart benches/peers.svg

Turns, rounds and ratios are those of comparison.py. Where a gateway cannot do what a scenario needs, the table has a dash.
"""

import argparse
import os
import statistics
import time

import comparison
import gateways
import load_generators
import machine

PEERS = (gateways.Nginx, gateways.NginxLua, gateways.Haproxy, gateways.Envoy, gateways.Caddy, gateways.Pingora, gateways.HaproxyTcp)
# Latency is measured at this part of nginx's highest rate.
LATENCY_LOAD = 0.5
PERCENTILES = (50, 99, 99.9)
MEMORY_TARGET_MIB = 15
# Memory of the counter table: two slots of 16 bytes for each counter.
BYTES_PER_COUNTER = 32


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparison.common_arguments(parser)
    comparison.plain_argument(parser)
    parser.set_defaults(rounds=4)
    parser.add_argument("--scenario", choices=gateways.SCENARIOS, action="append", help="default: all")
    parser.add_argument("--peer", choices=[peer.name for peer in PEERS], action="append", help="default: all")
    parser.add_argument("--chart", metavar="FILE", help="also draw the main scenarios, as SVG")
    comparison.run(measure, comparison.checked(parser))


def measure(options, directory, report):
    transom = gateways.Transom(options.transom)
    peers = [peer() for peer in PEERS if peer.name in (options.peer or [peer.name])]
    compared = [transom, gateways.UnprofiledTransom(options.plain), *peers]
    scenarios = [gateways.SCENARIOS[name] for name in options.scenario or gateways.SCENARIOS]
    generators = {load: load(directory) for load in load_generators.ALL}
    wrk, h2load = generators[load_generators.Wrk], generators[load_generators.H2load]
    comparison.require_all(options, [*compared, wrk, h2load, load_generators.Curl, gateways.Openssl])
    versions = [(each.name, each.version()) for each in (*compared, wrk, h2load)]
    facts = machine.description(versions)
    # Two for each connection, one of them to the upstream.
    machine.allow_descriptors(2 * max(scenario.connections or 0 for scenario in scenarios) + comparison.EXTRA_DESCRIPTORS)
    upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
    results = []
    with upstream:
        for scenario in scenarios:
            several = [gateway for gateway in compared if gateway.can(scenario)]
            results.append((scenario, *compare(options, directory, report, scenario, several, generators, upstream_port)))
        memory = idle_memory(transom, directory, upstream_port)
    report.section("Whole requests of all gateways")
    report.machine(facts, options, wrk)
    names = [gateway.name for gateway in compared]
    report.table(["figure", "scenario", *names], rows_of(results, names))
    report_memory(report, *memory)
    if options.chart:
        with open(options.chart, "w") as file:
            file.write(chart([result for result in results if result[0] in gateways.MAIN], names))


def compare(options, directory, report, scenario, compared, generators, upstream_port):
    """Returns the rate at which latency is measured, if it is, and the rounds: by gateway, its turn and the percentiles."""
    generator = generators[scenario.load]
    constant = generators[load_generators.Http2 if gateways.HTTP2 in scenario.needs else load_generators.H2load]

    def take_turn(gateway, rate=None):
        server, port = gateway.start(directory, upstream_port, scenario, {options.server_core})
        with server:
            turn = comparison.take_turn(server, port, scenario, generator, options)
            times = constant.latencies(options.load_core, port, options.seconds, scenario, rate) if rate else []
        if os.path.exists(gateways.access_log(directory)):
            os.remove(gateways.access_log(directory))
        return turn, [times[int(len(times) * part / 100)] for part in PERCENTILES if times]

    rate, rounds = None, []
    nginx = [gateway for gateway in compared if gateway.name == gateways.Nginx.name]
    if scenario in gateways.MAIN and nginx:
        rate = take_turn(nginx[0])[0].rate * LATENCY_LOAD
    for number in range(options.rounds):
        rounds.append({gateway.name: take_turn(gateway, rate) for gateway in comparison.in_turn(compared, number)})
        report.round(scenario, number, {name: turn for name, (turn, _) in rounds[-1].items()})
    return rate, rounds


def rows_of(results, names):
    """Returns the rows of the table: a figure of all scenarios, then the next figure."""
    rows = []
    for figure, cell in FIGURES.items():
        for scenario, rate, rounds in results:
            if cell is latency and rate is None:
                continue
            title = f"{scenario.name}, {rate:,.0f}/s" if cell is latency else scenario.name
            rows.append([figure, title, *(cell(scenario, rounds, name) if name in rounds[0] else "–" for name in names)])
    return rows


def median(rounds, name, field):
    return statistics.median(getattr(turns[name][0], field) for turns in rounds)


def cpu_time(_, rounds, name):
    cpu_us, user_us = median(rounds, name, "cpu_us"), median(rounds, name, "user_us")
    return f"{cpu_us:.2f} = {user_us:.2f} + {cpu_us - user_us:.2f}"


def ratio(scenario, rounds, name):
    if name == "transom":
        return "1"
    ratios = sorted(turns["transom"][0].cpu_us / turns[name][0].cpu_us for turns in rounds)
    middle, target = statistics.median(ratios), scenario.targets.get(name)
    verdict = "" if target is None else f", ≤ {target:.2f}: {comparison.met(middle <= target)}"
    return f"{middle:.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}){verdict}"


def latency(_, rounds, name):
    held = [turns[name][1] for turns in rounds if turns[name][1]]
    if len(held) < len(rounds):
        return "rate not held"
    return ", ".join(f"{statistics.median(figures):.2f}" for figures in zip(*held))


FIGURES = {
    "CPU time of a request, µs = user + system": cpu_time,
    "transom / this, median (min–max)": ratio,
    "latency at half of nginx's rate, ms: p50, p99, p99.9": latency,
    "requests/s": lambda _, rounds, name: f"{median(rounds, name, 'rate'):,.0f}",
    "memory after load, MiB": lambda _, rounds, name: f"{median(rounds, name, 'memory_mib'):.1f}",
    "core lost to others, worst": lambda _, rounds, name: f"{max(turns[name][0].others for turns in rounds):.0%}",
}


def idle_memory(transom, directory, upstream_port):
    """Returns the resident MiB of an idle gateway on all cores, with a tiny table and with the default one."""
    cores = os.sched_getaffinity(0)

    def resident(capacity):
        server, port = transom.start(directory, upstream_port, gateways.FORWARDING, cores, capacity)
        with server:
            load_generators.probe(port)
            time.sleep(1)
            return server.memory_mib()

    return resident(64), resident(1_000_000)


def report_memory(report, small, full):
    table = 1_000_000 * BYTES_PER_COUNTER / comparison.MIB
    targets = MEMORY_TARGET_MIB, MEMORY_TARGET_MIB + table
    report.table(
        ["transom idle, on all cores", "MiB", "target"],
        [
            [name, f"{mib:.1f}", f"< {target:.1f}: {comparison.met(mib < target)}"]
            for name, mib, target in zip(
                ["without the table (capacity = 64)", "with the default table (capacity = 1_000_000)"], (small, full), targets
            )
        ],
    )


def chart(results, names):
    """Returns the CPU times as SVG: a panel for each scenario, a bar for each gateway, user time before system time."""
    width, row, label = 260, 16, 100
    height = row * (len(names) + 2)
    panels = []
    for number, (scenario, _, rounds) in enumerate(results):
        medians = {
            name: [statistics.median(getattr(turns[name][0], field) for turns in rounds) for field in ("user_us", "cpu_us")]
            for name in names if name in rounds[0]
        }
        scale = (width - 60) / max(cpu for _, cpu in medians.values())
        x, y = number % 2 * (label + width + 20) + 10, number // 2 * height + 30
        panels.append(f'<text x="{x}" y="{y}" font-weight="bold">{scenario.name}: CPU time of a request, µs</text>')
        for line, name in enumerate(names, 1):
            top = y + line * row
            panels.append(f'<text x="{x + label - 6}" y="{top}" text-anchor="end">{name}</text>')
            if name not in medians:
                panels.append(f'<text x="{x + label}" y="{top}">–</text>')
                continue
            user, cpu = medians[name]
            for start, end, colour in ((0, user, "#3d7ea6"), (user, cpu, "#a8c6d8")):
                bar = f'x="{x + label + start * scale:.1f}" y="{top - 10}" width="{(end - start) * scale:.1f}" height="12"'
                panels.append(f'<rect {bar} fill="{colour}"/>')
            panels.append(f'<text x="{x + label + cpu * scale + 4:.1f}" y="{top}">{cpu:.1f}</text>')
    size = f"{2 * (label + width + 20)} {(len(results) + 1) // 2 * height + 30}"
    panels.append('<text x="10" y="14">dark: user time, light: system time</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *panels, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
