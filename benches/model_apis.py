#!/usr/bin/env python3
"""Limits of LLM tokens: how exact they are under concurrent calls, and what streams cost.

    cargo build --release && python3 benches/model_apis.py

Calls at the same time against a limit of 100 calls' worth, with a reserve of the whole cost and of a tenth; likewise over three gateways that
share a Redis, of which one is killed in the middle. CPU time of a streamed answer of 1 MiB with and without reading its usage.
"""

import argparse
import asyncio
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
COST = 100
CALLS_WORTH = 100
CALLS = 200
KEY = "sk-key"
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 0, "completion_tokens": COST, "total_tokens": COST},
}
# Ended with the program, also if a check fails.
PROCESSES = []


def start(*command, **options):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    PROCESSES.append(process)
    return process


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Model:
    """A server whose path says what it answers: `/big` 1 MiB of events, another an answer after a pause."""

    def __init__(self):
        self.used = 0

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=4096)
        self.port = self.server.sockets[0].getsockname()[1]

    async def serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                await self.answer(head.split(b" ")[1], writer)
                if b"Connection: close" in head:
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, path, writer):
        usage = json.dumps(ANSWER).encode()
        if path != b"/big":
            self.used += COST
            await asyncio.sleep(0.3)
            fields = b"Content-Type: application/json\r\nContent-Length: %d" % len(usage)
            writer.write(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (fields, usage))
            return await writer.drain()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        event = b'data: {"choices":[{"index":0,"delta":{"content":"word "}}],"model":"m","usage":null}\n\n'
        chunk = lambda data: b"%x\r\n%s\r\n" % (len(data), data)
        for _ in range((1 << 20) // 4096 + 10):
            writer.write(chunk(event * (4096 // len(event))))
            await writer.drain()
        writer.write(chunk(b"data: " + usage + b"\n\n") + b"0\r\n\r\n")
        await writer.drain()


async def get(port, path, request=None):
    """The status and the body; status 0 if the connection breaks off. `request`: JSON to send."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps(request).encode() if request else b""
        fields = f"Host: a\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}"
        fields += "\r\nContent-Type: application/json" if request else ""
        writer.write(f"{'POST' if request else 'GET'} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
        writer.close()
        return int(head.split(b" ")[1]), body
    except (ConnectionError, asyncio.IncompleteReadError):
        return 0, b""


class Gateway:
    def __init__(self, binary, model, cost, window, shared=""):
        self.port, self.admin = free_port(), free_port()
        self.folder = tempfile.TemporaryDirectory()
        rule = f'[rules.tokens]\nkey = "global"\nwindows = ["{window}/day"]\ncost = {cost}\n' if cost else ""
        rules = 'rules = ["tokens"]\n' if cost else ""
        config = pathlib.Path(self.folder.name, "gateway.toml")
        config.write_text(
            f'listen = {{ http = "127.0.0.1:{self.port}", admin = "127.0.0.1:{self.admin}" }}\n{shared}'
            f'[upstreams.u]\nservers = ["http://127.0.0.1:{model.port}"]\n{rule}'
            f'[[routes]]\npath = "/{{*rest}}"\nupstream = "u"\n{rules}'
        )
        self.process = start(binary, "--config", config)

    async def ready(self):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                return writer.close()
            except ConnectionError:
                assert self.process.poll() is None, "the gateway has ended"
                await asyncio.sleep(0.02)

    def cpu_s(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.kill()
        self.process.wait()


def stated(model, reserve, statuses):
    limit = CALLS_WORTH * COST
    admitted = model.used // COST
    bound = admitted * (COST - reserve)
    over = max(0, model.used - limit)
    print(f"  reserve {reserve:3}: used {model.used} of {limit}, over by {over} (bound {bound}); {statuses}")
    assert over <= bound


def count(results):
    statuses = [status for status, _ in results]
    return {status: statuses.count(status) for status in sorted(set(statuses))}


async def one_gateway(binary, reserve):
    model = Model()
    await model.start()
    cost = f'{{ usage = "auto", reserve = {reserve} }}'
    gateway = Gateway(binary, model, cost, CALLS_WORTH * COST)
    await gateway.ready()
    results = await asyncio.gather(*(get(gateway.port, "/call") for _ in range(CALLS)))
    stated(model, reserve, count(results))
    after = await get(gateway.port, "/call")
    print(f"    a later call gets {after[0]}")
    gateway.stop()


async def three_gateways(binary, reserve, mode):
    model = Model()
    await model.start()
    port = free_port()
    redis = start("redis-server", "--port", str(port), "--save", "")
    cost = f'{{ usage = "auto", reserve = {reserve} }}\nshared = "{mode}"'
    shared = f'[counters.shared]\nredis = "redis://127.0.0.1:{port}"\n'
    await asyncio.sleep(0.5)
    gateways = [Gateway(binary, model, cost, CALLS_WORTH * COST, shared) for _ in range(3)]
    for gateway in gateways:
        await gateway.ready()
    calls = [asyncio.create_task(get(gateways[number % 3].port, "/call")) for number in range(CALLS)]
    # The first answers are on their way.
    await asyncio.sleep(0.15)
    gateways[0].stop()
    results = await asyncio.gather(*calls)
    later = await asyncio.gather(*(get(gateways[1 + number % 2].port, "/call") for number in range(CALLS)))
    print(f"  {mode}:")
    stated(model, reserve, f"{count(results)}, then {count(later)}")
    for gateway in gateways[1:]:
        gateway.stop()
    redis.kill()
    redis.wait()


async def cpu_of_streams(binary, rounds=5, answers=100):
    model = Model()
    await model.start()
    gateways = {
        "without a rule": Gateway(binary, model, None, 0),
        "rule by requests": Gateway(binary, model, "1", 10**9),
        "rule by usage": Gateway(binary, model, '{ usage = "auto" }', 4 * 10**9),
    }
    taken = {name: [] for name in gateways}
    for gateway in gateways.values():
        await gateway.ready()
        await get(gateway.port, "/big")
    for _ in range(rounds):
        for name, gateway in gateways.items():
            before = gateway.cpu_s()
            for _ in range(answers):
                status, body = await get(gateway.port, "/big")
                assert status == 200 and len(body) > 1 << 20
            taken[name].append((gateway.cpu_s() - before) / answers * 1000)
    for name, gateway in gateways.items():
        print(f"  {name}: {statistics.median(taken[name]):.2f} ms of CPU a streamed answer of 1 MiB (rounds {min(taken[name]):.2f} to {max(taken[name]):.2f})")
        gateway.stop()


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", default=ROOT / "target/release/transom")
    binary = parser.parse_args().binary
    print(f"{CALLS} calls at the same time, one gateway:")
    for reserve in (COST, COST // 10):
        await one_gateway(binary, reserve)
    print(f"{CALLS} calls at the same time, three gateways on one Redis, of which one is killed; then {CALLS} more:")
    for mode in ("exact", "lease"):
        for reserve in (COST, COST // 10):
            await three_gateways(binary, reserve, mode)
    print("Streamed answers:")
    await cpu_of_streams(binary)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        for process in PROCESSES:
            process.kill()
            process.wait()
