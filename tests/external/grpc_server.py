#!/usr/bin/env python3
"""A gRPC server for the tests: every kind of call, every way to end, reflection and health.

    grpc_server.py [--tls CERTIFICATE KEY] [--port PORT]

Listens on a port that the system chooses, if it is told none, and prints `listening on 127.0.0.1:PORT`. Messages are the
wrappers of protobuf, so that nothing has to be generated; what the service looks like is told to
reflection in `describe`. This file does not know that there is a gateway before it.
"""

import argparse
import threading
from concurrent import futures

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.wrappers_pb2 import BytesValue, StringValue, UInt32Value
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

SERVICE = "parts.Talk"
# Longer than any test waits: a call that is still there then was never told of its end.
PATIENCE_S = 60


class Fates:
    """What became of the calls that wait for their end, by the name that the client gave them."""

    def __init__(self):
        self._changed = threading.Condition()
        self._fates = {}

    def tell(self, name, fate):
        with self._changed:
            self._fates[name] = fate
            self._changed.notify_all()

    def when(self, name, holds):
        """The fate of a call, as soon as it is one of which `holds` is true."""
        with self._changed:
            self._changed.wait_for(lambda: holds(self._fates.get(name)), PATIENCE_S)
            return self._fates.get(name, "never seen")


FATES = Fates()


def follow(context, name):
    """Remembers how this call ends. The returned event is set at its end."""
    ended = threading.Event()

    def end():
        # Nobody can tell the two apart but by the clock: the client resets the stream in both cases.
        FATES.tell(name, "out of time" if (context.time_remaining() or 1) <= 0 else "cancelled")
        ended.set()

    FATES.tell(name, "running")
    if not context.add_callback(end):
        end()
    return ended


def echo(request, context):
    """Returns the message, and every field of the client's whose name begins with `x-` in both places."""
    ours = [(key, value) for key, value in context.invocation_metadata() if key.startswith("x-")]
    context.send_initial_metadata(ours)
    context.set_trailing_metadata([("x-end-" + key.removeprefix("x-"), value) for key, value in ours])
    return request


def count(request, _context):
    """So many numbers, from 0."""
    for number in range(request.value):
        yield UInt32Value(value=number)


def total(requests, _context):
    """The sum, when the client has said everything."""
    return UInt32Value(value=sum(request.value for request in requests))


def chat(requests, _context):
    """Answers each message when it comes, and says goodbye after the last."""
    for request in requests:
        yield StringValue(value="you said " + request.value)
    yield StringValue(value="goodbye")


def first(requests, _context):
    """Answers the first message and ends the call, whatever the client still has to say."""
    yield StringValue(value="enough of " + next(requests).value)


def wait(request, context):
    """Never answers; remembers whether the client gave up or ran out of time."""
    follow(context, request.value).wait(PATIENCE_S)
    return StringValue(value="nobody told me to stop")


def tick(request, context):
    """One message, and then silence until the client goes away."""
    ended = follow(context, request.value)
    yield StringValue(value="started")
    ended.wait(PATIENCE_S)


def started(request, _context):
    """Answers as soon as a call of `wait` or `tick` is here."""
    return StringValue(value=FATES.when(request.value, lambda fate: fate is not None))


def fate(request, _context):
    """What became of a call of `wait` or `tick`, as soon as it has ended."""
    return StringValue(value=FATES.when(request.value, lambda fate: fate not in (None, "running")))


def remaining(_request, context):
    """The milliseconds that this call has left; 0 without a deadline."""
    left_s = context.time_remaining()
    return UInt32Value(value=0 if left_s is None or left_s > 1e6 else int(left_s * 1000))


def fail(request, context):
    """Ends with the status of that number, before any message."""
    code = next(code for code in grpc.StatusCode if code.value[0] == request.value)
    context.set_trailing_metadata([("x-why-bin", b"\x00\xff\x80")])
    context.abort(code, f"status {request.value}: 100 % broken, naïve café")


def fail_late(request, context):
    """Two messages, then the status of that number."""
    yield from count(UInt32Value(value=2), context)
    fail(request, context)


UNARY, ANSWERS, ASKS, BOTH = (
    grpc.unary_unary_rpc_method_handler,
    grpc.unary_stream_rpc_method_handler,
    grpc.stream_unary_rpc_method_handler,
    grpc.stream_stream_rpc_method_handler,
)
METHODS = {
    "Echo": (UNARY, echo, BytesValue, BytesValue),
    "Count": (ANSWERS, count, UInt32Value, UInt32Value),
    "Total": (ASKS, total, UInt32Value, UInt32Value),
    "Chat": (BOTH, chat, StringValue, StringValue),
    "First": (BOTH, first, StringValue, StringValue),
    "Wait": (UNARY, wait, StringValue, StringValue),
    "Tick": (ANSWERS, tick, StringValue, StringValue),
    "Started": (UNARY, started, StringValue, StringValue),
    "Fate": (UNARY, fate, StringValue, StringValue),
    "Remaining": (UNARY, remaining, StringValue, UInt32Value),
    "Fail": (UNARY, fail, UInt32Value, UInt32Value),
    "FailLate": (ANSWERS, fail_late, UInt32Value, UInt32Value),
}


def describe():
    """Tells protobuf's registry what the service looks like; reflection answers from there."""
    file = descriptor_pb2.FileDescriptorProto(
        name="parts/talk.proto", package="parts", syntax="proto3", dependency=["google/protobuf/wrappers.proto"]
    )
    service = file.service.add(name=SERVICE.partition(".")[2])
    for name, (kind, _call, request, response) in METHODS.items():
        service.method.add(
            name=name,
            input_type="." + request.DESCRIPTOR.full_name,
            output_type="." + response.DESCRIPTOR.full_name,
            client_streaming=kind in (ASKS, BOTH),
            server_streaming=kind in (ANSWERS, BOTH),
        )
    descriptor_pool.Default().Add(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files; clear text without")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    describe()
    # Calls that wait hold a thread each.
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
