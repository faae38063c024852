"""Calls mcp_server.py through a gateway with the SDK of MCP, with and without sessions.

    mcp_client.py HOST:PORT

Expects that the gateway permits each bearer token 3 calls of each tool. Prints `ok NAME` or `FAILED NAME: why` for each check, and fails
if one of them failed.
"""

import asyncio
import contextlib
import sys
import traceback

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

TIMEOUT_S = 30


def assert_equal(actual, expected):
    if actual != expected:
        raise AssertionError(f"{actual!r:.500} instead of {expected!r:.500}")


def text(result):
    assert_equal(result.is_error, False)
    return result.content[0].text


async def results_and_progress_pass(client):
    assert_equal([tool.name for tool in (await client.list_tools()).tools], ["search", "count", "wait"])
    assert_equal(text(await client.call_tool("search", {"query": "a"})), "found a")
    progress = []

    async def report(*values):
        progress.append(values[:2])

    assert_equal(text(await client.call_tool("count", {"to": 3}, progress_callback=report)), "counted")
    assert_equal(progress, [(0, 3), (1, 3), (2, 3)])


async def each_tool_has_a_limit(client):
    for _ in range(3):
        assert_equal(text(await client.call_tool("search", {"query": "a"})), "found a")
    try:
        await client.call_tool("search", {"query": "a"})
    except MCPError:
        pass
    else:
        raise AssertionError("the fourth call was not refused")
    assert_equal(text(await client.call_tool("count", {"to": 1})), "counted")


async def a_call_is_cancelled_in_the_middle(client):
    started = asyncio.Event()

    async def report(*_values):
        started.set()

    call = asyncio.create_task(client.call_tool("wait", progress_callback=report))
    await started.wait()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    assert_equal(text(await client.call_tool("search", {"query": "a"})), "found a")


CHECKS = [results_and_progress_pass, each_tool_has_a_limit, a_call_is_cancelled_in_the_middle]


async def run(check, address, mode):
    headers = {"Authorization": f"Bearer {mode}-{check.__name__}"}
    async with asyncio.timeout(TIMEOUT_S), httpx2.AsyncClient(headers=headers, trust_env=False, timeout=TIMEOUT_S) as http:
        async with Client(streamable_http_client(f"http://{address}/mcp", http_client=http), mode=mode) as client:
            await check(client)


def main():
    [address] = sys.argv[1:]
    failed = False
    # `legacy` begins a session with `initialize`; `auto` has none with this server.
    for mode in ("auto", "legacy"):
        for check in CHECKS:
            try:
                asyncio.run(run(check, address, mode))
                print(f"ok {mode}: {check.__name__}")
            except Exception:
                failed = True
                print(f"FAILED {mode}: {check.__name__}: {traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
