#!/usr/bin/env python3
"""A login server.

    login_server.py USER=PASSWORD…

GET /login?user=USER&password=PASSWORD gets 200 for the right password and 401 for another. GET /received gets the number of
logins received, by user, as JSON. Listens on a port that the system chooses and prints `listening on 127.0.0.1:PORT`.
"""

import collections
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PASSWORDS = dict(argument.split("=", 1) for argument in sys.argv[1:])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    received = collections.Counter()
    lock = threading.Lock()

    def do_GET(self):
        url = urlsplit(self.path)
        if url.path == "/received":
            with self.lock:
                self._respond(200, json.dumps(self.received))
        elif url.path == "/login":
            fields = {name: values[0] for name, values in parse_qs(url.query).items()}
            user = fields.get("user", "")
            with self.lock:
                self.received[user] += 1
            is_right = user in PASSWORDS and fields.get("password") == PASSWORDS[user]
            self._respond(*((200, "welcome\n") if is_right else (401, "wrong password\n")))
        else:
            self._respond(404, "no such page\n")

    def _respond(self, status, text):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Disables the log: the test reads the standard output."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main():
    server = Server(("127.0.0.1", 0), Handler)
    print(f"listening on 127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
