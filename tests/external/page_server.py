#!/usr/bin/env python3
"""Serves page.html, which uses requests, event streams and WebSockets as browsers do.

    page_server.py

Listens on a port that the system chooses and prints `listening on 127.0.0.1:PORT`. It uses HTTP/1.1
without TLS, like an upstream; websocket_server.py serves the WebSocket of the page.
"""

import os
import queue
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html")
IMAGE = b'<svg xmlns="http://www.w3.org/2000/svg" width="17" height="4"></svg>'
EVENTS = 5
# Longer than the timeout of any test.
TIMEOUT_S = 60


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Events that the browser has confirmed. One browser at a time.
    seen = queue.SimpleQueue()

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path == "/":
            with open(PAGE, "rb") as file:
                self._respond("text/html", file.read())
        elif path == "/style.css":
            self._respond("text/css", b"body { --loaded: yes }")
        elif path == "/image.svg":
            self._respond("image/svg+xml", IMAGE)
        elif path == "/number":
            self._respond("text/plain", query.encode())
        elif path == "/events":
            self._events()
        else:
            self._respond("text/plain", b"no such page\n", status=404)

    def do_POST(self):
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if path == "/seen":
            self.seen.put(query)
        self._respond("application/octet-stream", body)

    def _respond(self, kind, body, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _events(self):
        """Sends each event after the browser has confirmed the previous one."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(EVENTS):
            self._chunk(f"data: {number}\n\n")
            if self.seen.get(timeout=TIMEOUT_S) != str(number):
                raise ValueError("the browser confirmed another event than the last one")
        self._chunk("data: last\n\n")
        self._chunk("")

    def _chunk(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def log_message(self, *_):
        """Disables the log: the test reads the standard output."""


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"listening on 127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
