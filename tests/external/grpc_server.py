#!/usr/bin/env python3
"""A gRPC server for the tests: every kind of call, every status, cancellation, reflection and health.

    grpc_server.py [--tls CERTIFICATE KEY] [--port PORT]

Listens on PORT, or on a port that the system chooses, and prints `listening on 127.0.0.1:PORT`. Messages are
protobuf's wrapper types, so that no code has to be generated; `describe` registers the service for
reflection. The server does not depend on the gateway.
"""

import argparse
import threading
from concurrent import futures

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.wrappers_pb2 import BytesValue, StringValue, UInt32Value
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

SERVICE = "tests.Calls"
# Longer than the timeout of any test: a call that is still open then was not ended.
TIMEOUT_S = 60


class CallOutcomes:
    """The outcomes of calls that wait for their end, by the name that the client chose."""

    def __init__(self):
        self._changed = threading.Condition()
        self._outcomes = {}

    def record(self, name, outcome):
        with self._changed:
            self._outcomes[name] = outcome
            self._changed.notify_all()

    def wait_for(self, name, holds):
        """Returns the outcome of a call as soon as `holds` is true for it."""
        with self._changed:
            self._changed.wait_for(lambda: holds(self._outcomes.get(name)), TIMEOUT_S)
            return self._outcomes.get(name, "never started")


OUTCOMES = CallOutcomes()


def follow(context, name):
    """Records how this call ends. The returned event is set at its end."""
    ended = threading.Event()

    def end():
        # Only the clock distinguishes the two: the client resets the stream in both cases.
        OUTCOMES.record(name, "deadline exceeded" if (context.time_remaining() or 1) <= 0 else "cancelled")
        ended.set()

    OUTCOMES.record(name, "running")
    if not context.add_callback(end):
        end()
    return ended


def echo(request, context):
    """Returns the message, and all client fields whose name begins with `x-`, as headers and trailers."""
    fields = [(key, value) for key, value in context.invocation_metadata() if key.startswith("x-")]
    context.send_initial_metadata(fields)
    context.set_trailing_metadata([("x-end-" + key.removeprefix("x-"), value) for key, value in fields])
    return request


def count(request, _context):
    """Sends the requested number of numbers, from 0."""
    for number in range(request.value):
        yield UInt32Value(value=number)


def total(requests, _context):
    """Returns the sum after the last message of the client."""
    return UInt32Value(value=sum(request.value for request in requests))


def chat(requests, _context):
    """Responds to each message at once, and sends `end` after the last."""
    for request in requests:
        yield StringValue(value="received " + request.value)
    yield StringValue(value="end")


def first(requests, _context):
    """Responds to the first message and ends the call, without waiting for the client."""
    yield StringValue(value="first: " + next(requests).value)


def wait(request, context):
    """Never responds; records whether the client cancelled or reached its deadline."""
    follow(context, request.value).wait(TIMEOUT_S)
    return StringValue(value="the call was not cancelled")


def tick(request, context):
    """Sends one message, then nothing until the client disconnects."""
    ended = follow(context, request.value)
    yield StringValue(value="started")
    ended.wait(TIMEOUT_S)


def started(request, _context):
    """Responds as soon as a call of `wait` or `tick` has arrived."""
    return StringValue(value=OUTCOMES.wait_for(request.value, lambda outcome: outcome is not None))


def outcome(request, _context):
    """Returns the outcome of a call of `wait` or `tick`, as soon as it has ended."""
    return StringValue(value=OUTCOMES.wait_for(request.value, lambda outcome: outcome not in (None, "running")))


def remaining(_request, context):
    """Returns the milliseconds until the deadline of this call; 0 without a deadline."""
    remaining_s = context.time_remaining()
    return UInt32Value(value=0 if remaining_s is None or remaining_s > 1e6 else int(remaining_s * 1000))


def fail(request, context):
    """Ends with the requested status, before any message."""
    code = next(code for code in grpc.StatusCode if code.value[0] == request.value)
    context.set_trailing_metadata([("x-why-bin", b"\x00\xff\x80")])
    context.abort(code, f"status {request.value}: 100 % broken, naïve café")


def fail_late(request, context):
    """Sends two messages, then the requested status."""
    yield from count(UInt32Value(value=2), context)
    fail(request, context)


UNARY, SERVER_STREAM, CLIENT_STREAM, BOTH_STREAM = (
    grpc.unary_unary_rpc_method_handler,
    grpc.unary_stream_rpc_method_handler,
    grpc.stream_unary_rpc_method_handler,
    grpc.stream_stream_rpc_method_handler,
)
METHODS = {
    "Echo": (UNARY, echo, BytesValue, BytesValue),
    "Count": (SERVER_STREAM, count, UInt32Value, UInt32Value),
    "Total": (CLIENT_STREAM, total, UInt32Value, UInt32Value),
    "Chat": (BOTH_STREAM, chat, StringValue, StringValue),
    "First": (BOTH_STREAM, first, StringValue, StringValue),
    "Wait": (UNARY, wait, StringValue, StringValue),
    "Tick": (SERVER_STREAM, tick, StringValue, StringValue),
    "Started": (UNARY, started, StringValue, StringValue),
    "Outcome": (UNARY, outcome, StringValue, StringValue),
    "Remaining": (UNARY, remaining, StringValue, UInt32Value),
    "Fail": (UNARY, fail, UInt32Value, UInt32Value),
    "FailLate": (SERVER_STREAM, fail_late, UInt32Value, UInt32Value),
}


def describe():
    """Registers the service with protobuf, which reflection uses."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tests/calls.proto", package="tests", syntax="proto3", dependency=["google/protobuf/wrappers.proto"]
    )
    service = file.service.add(name=SERVICE.partition(".")[2])
    for name, (kind, _call, request, response) in METHODS.items():
        service.method.add(
            name=name,
            input_type="." + request.DESCRIPTOR.full_name,
            output_type="." + response.DESCRIPTOR.full_name,
            client_streaming=kind in (CLIENT_STREAM, BOTH_STREAM),
            server_streaming=kind in (SERVER_STREAM, BOTH_STREAM),
        )
    descriptor_pool.Default().Add(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files; default: cleartext")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    describe()
    # Each waiting call occupies a thread.
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=64))
    handlers = {
        name: kind(call, request_deserializer=request.FromString, response_serializer=response.SerializeToString)
        for name, (kind, call, request, response) in METHODS.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    healthy = health.HealthServicer()
    healthy.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    port = listen(server, f"127.0.0.1:{options.port}", options.tls)
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def listen(server, address, tls):
    if not tls:
        return server.add_insecure_port(address)
    certificate, key = (open(name, "rb").read() for name in tls)
    return server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))


if __name__ == "__main__":
    main()
