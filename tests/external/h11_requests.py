"""Reads the requests that an upstream received with h11, and compares them with those that hyper has read.

    python3 h11_requests.py FOLDER

Each connection is two files: N.bytes, all that was received, and N.json, the complete requests as lists of method, path and body in
hex. h11 must accept all bytes: the gateway passes on nothing that servers can read in two ways.
"""

import json
import pathlib
import sys

import h11


def complete_requests(received):
    """The complete requests in these bytes, and the error if h11 refuses them."""
    connection = h11.Connection(our_role=h11.SERVER)
    requests, current = [], None
    # The end of the stream is not read: the last request may be cut, as its client has cut it.
    connection.receive_data(received)
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            return requests, error
        match event:
            case h11.Request():
                path = event.target.decode().split("?")[0]
                current = [event.method.decode(), path, b""]
            case h11.Data():
                current[2] += bytes(event.data)
            case h11.EndOfMessage():
                requests.append([*current[:2], current[2].hex()])
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return requests, None
                connection.start_next_cycle()
            case _:
                return requests, None


def main():
    folder = pathlib.Path(sys.argv[1])
    count = 0
    for file in folder.glob("*.bytes"):
        received, expected = file.read_bytes(), json.loads(file.with_suffix(".json").read_text())
        requests, error = complete_requests(received)
        count += len(requests)
        if error or requests != expected:
            print(f"FAILED: {received}\nh11: {requests}, {error}\nhyper: {expected}")
    print(f"{count} requests")
    if not count:
        print("FAILED: nothing was forwarded")


main()
