#!/usr/bin/env python3
"""Tests every call of grpc_server.py with the common gRPC library.

    grpc_client.py HOST:PORT [--ca FILE] [--refused] [--only NAME ...]

Prints `ok NAME` or `FAILED NAME: why` for each check, and fails if one of them failed. With `--refused`
it expects refusals by a rate limit instead. Without `--ca` it uses HTTP/2 without TLS.
"""

import argparse
import queue
import sys
import threading
import time
import traceback
import uuid

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.wrappers_pb2 import BytesValue, StringValue, UInt32Value
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

SERVICE = "tests.Calls"
# The timeout of a call: a call that hangs fails before the timeout of the test.
LIMIT_S = 20
MIB = 1024 * 1024


class Service:
    """The methods of the service."""

    def __init__(self, channel):
        self.channel = channel
        unary, server_stream_call, client_stream_call, both_stream_call = (
            channel.unary_unary, channel.unary_stream, channel.stream_unary, channel.stream_stream
        )
        self.echo = self._call(unary, "Echo", BytesValue)
        self.count = self._call(server_stream_call, "Count", UInt32Value)
        self.total = self._call(client_stream_call, "Total", UInt32Value)
        self.chat = self._call(both_stream_call, "Chat", StringValue)
        self.first = self._call(both_stream_call, "First", StringValue)
        self.wait = self._call(unary, "Wait", StringValue)
        self.tick = self._call(server_stream_call, "Tick", StringValue)
        self.started = self._call(unary, "Started", StringValue)
        self.outcome = self._call(unary, "Outcome", StringValue)
        self.remaining = self._call(unary, "Remaining", UInt32Value)
        self.fail = self._call(unary, "Fail", UInt32Value)
        self.fail_late = self._call(server_stream_call, "FailLate", UInt32Value)
        self.absent = self._call(unary, "Absent", StringValue)

    @staticmethod
    def _call(kind, name, response):
        return kind(
            f"/{SERVICE}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )


CHECKS = []


def check(function):
    CHECKS.append((function.__name__, function))
    return function


def assert_equal(actual, expected):
    if actual != expected:
        raise AssertionError(f"{str(actual)[:200]} instead of {str(expected)[:200]}")


def error_of(call):
    """Runs a call that must fail and returns its error."""
    try:
        response = call()
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"the call returned {str(response)[:200]} instead of an error")


def text(value):
    return StringValue(value=value)


def number(value):
    return UInt32Value(value=value)


@check
def unary_once(service):
    assert_equal(service.echo(BytesValue(value=b"hello"), timeout=LIMIT_S).value, b"hello")


@check
def unary(service):
    for body in (b"", b"hello", bytes(range(256)) * 40):
        assert_equal(service.echo(BytesValue(value=body), timeout=LIMIT_S).value, body)


@check
def unary_of_3_mib(service):
    body = bytes(range(256)) * (3 * MIB // 256)
    assert_equal(service.echo(BytesValue(value=body), timeout=LIMIT_S).value, body)


@check
def compressed(service):
    body = b"again and " * 100_000
    response = service.echo(BytesValue(value=body), timeout=LIMIT_S, compression=grpc.Compression.Gzip)
    assert_equal(response.value, body)


@check
def metadata(service):
    """Fields are forwarded in both directions, as headers and trailers, text and binary, one name twice."""
    sent = [("x-text", "a b"), ("x-many", "1"), ("x-many", "2"), ("x-raw-bin", b"\x00\xff\r\n")]
    response, call = service.echo.with_call(BytesValue(value=b"m"), timeout=LIMIT_S, metadata=sent)
    assert_equal(response.value, b"m")
    begin = sorted((key, value) for key, value in call.initial_metadata() if key.startswith("x-"))
    # A gateway adds fields for the server, such as X-Forwarded-For, which the server also returns.
    added = ("x-forwarded-", "x-request-id")
    assert_equal([field for field in begin if not field[0].startswith(added)], sorted(sent))
    end = {key: value for key, value in call.trailing_metadata()}
    assert_equal((end.get("x-end-text"), end.get("x-end-raw-bin")), ("a b", b"\x00\xff\r\n"))


@check
def server_stream(service):
    assert_equal([each.value for each in service.count(number(1000), timeout=LIMIT_S)], list(range(1000)))
    assert_equal(list(service.count(number(0), timeout=LIMIT_S)), [])


@check
def client_stream(service):
    assert_equal(service.total((number(each) for each in range(1000)), timeout=LIMIT_S).value, 499_500)
    assert_equal(service.total(iter(()), timeout=LIMIT_S).value, 0)


@check
def both_ways_in_turn(service):
    """Sends each message only after the response to the previous one: a delayed message makes this check hang."""
    messages = queue.SimpleQueue()
    responses = service.chat(iter(messages.get, None), timeout=LIMIT_S)
    for round_number in range(100):
        messages.put(text(str(round_number)))
        assert_equal(next(responses).value, f"received {round_number}")
    messages.put(None)
    assert_equal([each.value for each in responses], ["end"])


@check
def both_ways_at_once(service):
    # Several flow control windows in each direction.
    messages = ("x" * 1000 + str(round_number) for round_number in range(500))
    responses = [each.value for each in service.chat((text(each) for each in messages), timeout=LIMIT_S)]
    assert_equal(len(responses), 501)
    assert_equal(responses[499][-3:], "499")


@check
def the_server_ends_first(service):
    """The response is complete although the client has not sent everything."""
    released = threading.Event()

    def messages():
        yield text("this")
        released.wait(LIMIT_S)

    responses = service.first(messages(), timeout=LIMIT_S)
    assert_equal([each.value for each in responses], ["first: this"])
    assert_equal(responses.code(), grpc.StatusCode.OK)
    released.set()


@check
def every_status(service):
    for code in grpc.StatusCode:
        value = code.value[0]
        if value == 0:
            continue
        error = error_of(lambda: service.fail(number(value), timeout=LIMIT_S))
        assert_equal((error.code(), error.details()), (code, f"status {value}: 100 % broken, naïve café"))
        assert_equal(dict(error.trailing_metadata()).get("x-why-bin"), b"\x00\xff\x80")


@check
def a_status_after_messages(service):
    responses, actual = service.fail_late(number(9), timeout=LIMIT_S), []
    error = error_of(lambda: [actual.append(each.value) for each in responses])
    assert_equal((actual, error.code()), ([0, 1], grpc.StatusCode.FAILED_PRECONDITION))


@check
def an_absent_method(service):
    assert_equal(error_of(lambda: service.absent(text(""), timeout=LIMIT_S)).code(), grpc.StatusCode.UNIMPLEMENTED)


@check
def the_server_sees_the_deadline(service):
    remaining_ms = service.remaining(text(""), timeout=LIMIT_S).value
    # The library rounds the deadline up before it sends it.
    if not 0 < remaining_ms <= LIMIT_S * 1000 + 1000:
        raise AssertionError(f"{remaining_ms} ms of {LIMIT_S} s remain")


@check
def a_deadline(service):
    """The client cancels the call at its deadline, and the server notices."""
    name = str(uuid.uuid4())
    start = time.monotonic()
    error = error_of(lambda: service.wait(text(name), timeout=1))
    assert_equal(error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
    if time.monotonic() - start > LIMIT_S:
        raise AssertionError("the deadline passed too late")
    outcome = service.outcome(text(name), timeout=LIMIT_S).value
    if outcome not in ("cancelled", "deadline exceeded"):
        raise AssertionError(f"the outcome at the server is {outcome}")


@check
def cancelled_before_a_response(service):
    name = str(uuid.uuid4())
    call = service.wait.future(text(name), timeout=4 * LIMIT_S)
    # A call that is cancelled early is never sent.
    assert_equal(service.started(text(name), timeout=LIMIT_S).value, "running")
    call.cancel()
    assert_equal(service.outcome(text(name), timeout=LIMIT_S).value, "cancelled")


@check
def cancelled_within_a_stream(service):
    name = str(uuid.uuid4())
    responses = service.tick(text(name), timeout=4 * LIMIT_S)
    assert_equal(next(responses).value, "started")
    responses.cancel()
    assert_equal(service.outcome(text(name), timeout=LIMIT_S).value, "cancelled")


@check
def a_hundred_at_once(service):
    calls = [service.echo.future(BytesValue(value=b"%d" % each), timeout=LIMIT_S) for each in range(100)]
    assert_equal([call.result().value for call in calls], [b"%d" % each for each in range(100)])


@check
def reflection_describes_the_service(service):
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    request_type = reflection_pb2.ServerReflectionRequest
    requests = [request_type(list_services=""), request_type(file_containing_symbol=SERVICE)]
    listed, described = stub.ServerReflectionInfo(iter(requests), timeout=LIMIT_S)
    names = {each.name for each in listed.list_services_response.service}
    if SERVICE not in names:
        raise AssertionError(f"only {names}")
    files = described.file_descriptor_response.file_descriptor_proto
    methods = [
        method.name
        for file in map(descriptor_pb2.FileDescriptorProto.FromString, files)
        for each in file.service
        for method in each.method
    ]
    if "Echo" not in methods or "Chat" not in methods:
        raise AssertionError(f"only {methods}")


@check
def health_is_reported(service):
    stub, serving = health_pb2_grpc.HealthStub(service.channel), health_pb2.HealthCheckResponse.SERVING
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    assert_equal(stub.Check(request, timeout=LIMIT_S).status, serving)
    watching = stub.Watch(request, timeout=4 * LIMIT_S)
    assert_equal(next(watching).status, serving)
    watching.cancel()


def refused(service):
    """A rate limit refuses all kinds of calls with a gRPC status."""
    calls = {
        "unary": lambda: service.echo(BytesValue(value=b"x"), timeout=LIMIT_S),
        "server stream": lambda: list(service.count(number(3), timeout=LIMIT_S)),
        "client stream": lambda: service.total(iter([number(1)] * 100), timeout=LIMIT_S),
        "both ways": lambda: list(service.chat(iter([text("x")] * 100), timeout=LIMIT_S)),
    }
    for name, call in calls.items():
        error = error_of(call)
        assert_equal((name, error.code()), (name, grpc.StatusCode.RESOURCE_EXHAUSTED))
        if not error.details():
            raise AssertionError(f"{name}: without a message")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="PEM file of the authority; enables TLS")
    parser.add_argument("--name", default="localhost", help="the name in the certificate (default localhost)")
    parser.add_argument("--refused", action="store_true", help="expect refusals by a rate limit")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these checks")
    options = parser.parse_args()
    checks = CHECKS
    if options.refused:
        checks = [("refused", refused)]
    elif options.only:
        checks = [(name, function) for name, function in CHECKS if name in options.only]
    failed = 0
    with channel(options) as open_channel:
        service = Service(open_channel)
        for name, function in checks:
            failed += not run_check(name, function, service)
    sys.exit(1 if failed or not checks else 0)


def channel(options):
    # Ignores proxies in the environment.
    settings = [("grpc.enable_http_proxy", 0)]
    if not options.ca:
        return grpc.insecure_channel(options.target, settings)
    with open(options.ca, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    settings.append(("grpc.ssl_target_name_override", options.name))
    return grpc.secure_channel(options.target, credentials, settings)


def run_check(name, function, service):
    try:
        function(service)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{each.name}:{each.lineno}" for each in where if each.filename == __file__]
        print(f"FAILED {name}: {type(error).__name__} {error} ({', '.join(lines)})", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


if __name__ == "__main__":
    main()
