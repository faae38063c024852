"""An MCP server with the SDK of MCP: the tools `search`, `count`, which reports its progress, and `wait`, which ends when it is cancelled.

    mcp_server.py     # prints its address

`GET /calls` states how often each tool was called, and how many calls of `wait` were cancelled.
"""

import socket

import anyio
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from starlette.responses import JSONResponse

CALLS = {"search": 0, "count": 0, "wait": 0, "cancelled": 0}
server = MCPServer("tools")


@server.tool()
def search(query: str) -> str:
    CALLS["search"] += 1
    return f"found {query}"


@server.tool()
async def count(to: int, context: Context) -> str:
    CALLS["count"] += 1
    for number in range(to):
        await context.report_progress(number, to)
    return "counted"


@server.tool()
async def wait(context: Context) -> str:
    CALLS["wait"] += 1
    try:
        await context.report_progress(0, 1)
        await anyio.sleep_forever()
    finally:
        CALLS["cancelled"] += 1


@server.custom_route("/calls", methods=["GET"])
async def calls(_request):
    return JSONResponse(CALLS)


def main():
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"listening on 127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
