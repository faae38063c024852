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

SERVICE = "parts.Talk"
# Longest time of a call: a call that hangs fails before the test's own limit.
LIMIT_S = 20
MIB = 1024 * 1024


class Talk:
    """The service as the client sees it."""

    def __init__(self, channel):
        self.channel = channel
        unary, answers, asks, both = (
            channel.unary_unary, channel.unary_stream, channel.stream_unary, channel.stream_stream
        )
        self.echo = self._call(unary, "Echo", BytesValue)
        self.count = self._call(answers, "Count", UInt32Value)
        self.total = self._call(asks, "Total", UInt32Value)
        self.chat = self._call(both, "Chat", StringValue)
        self.first = self._call(both, "First", StringValue)
        self.wait = self._call(unary, "Wait", StringValue)
        self.tick = self._call(answers, "Tick", StringValue)
        self.started = self._call(unary, "Started", StringValue)
        self.outcome = self._call(unary, "Outcome", StringValue)
        self.remaining = self._call(unary, "Remaining", UInt32Value)
        self.fail = self._call(unary, "Fail", UInt32Value)
        self.fail_late = self._call(answers, "FailLate", UInt32Value)
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


def same(seen, wanted):
    if seen != wanted:
        raise AssertionError(f"{str(seen)[:200]} instead of {str(wanted)[:200]}")


def error_of(call):
    """Runs a call that must fail and returns its error."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"answered {str(answer)[:200]}, and should have failed")


def text(words):
    return StringValue(value=words)


def number(value):
    return UInt32Value(value=value)


@check
def unary_once(talk):
    same(talk.echo(BytesValue(value=b"hello"), timeout=LIMIT_S).value, b"hello")


@check
def unary(talk):
    for body in (b"", b"hello", bytes(range(256)) * 40):
        same(talk.echo(BytesValue(value=body), timeout=LIMIT_S).value, body)


@check
def unary_of_3_mib(talk):
    body = bytes(range(256)) * (3 * MIB // 256)
    same(talk.echo(BytesValue(value=body), timeout=LIMIT_S).value, body)


@check
def compressed(talk):
    body = b"again and " * 100_000
    answer = talk.echo(BytesValue(value=body), timeout=LIMIT_S, compression=grpc.Compression.Gzip)
    same(answer.value, body)


@check
def metadata(talk):
    """Fields pass in both directions, as headers and trailers, text and binary, one name twice."""
    sent = [("x-text", "a b"), ("x-many", "1"), ("x-many", "2"), ("x-raw-bin", b"\x00\xff\r\n")]
    answer, call = talk.echo.with_call(BytesValue(value=b"m"), timeout=LIMIT_S, metadata=sent)
    same(answer.value, b"m")
    begin = sorted((key, value) for key, value in call.initial_metadata() if key.startswith("x-"))
    # A gateway adds fields for the server, such as X-Forwarded-For, which the server also returns.
    same([field for field in begin if not field[0].startswith("x-forwarded-")], sorted(sent))
    end = {key: value for key, value in call.trailing_metadata()}
    same((end.get("x-end-text"), end.get("x-end-raw-bin")), ("a b", b"\x00\xff\r\n"))


@check
def server_stream(talk):
    same([each.value for each in talk.count(number(1000), timeout=LIMIT_S)], list(range(1000)))
    same(list(talk.count(number(0), timeout=LIMIT_S)), [])


@check
def client_stream(talk):
    same(talk.total((number(each) for each in range(1000)), timeout=LIMIT_S).value, 499_500)
    same(talk.total(iter(()), timeout=LIMIT_S).value, 0)


@check
def both_ways_in_turn(talk):
    """Sends each message only after the response to the previous one: a message that is held back hangs here."""
    words = queue.SimpleQueue()
    answers = talk.chat(iter(words.get, None), timeout=LIMIT_S)
    for turn in range(100):
        words.put(text(str(turn)))
        same(next(answers).value, f"you said {turn}")
    words.put(None)
    same([each.value for each in answers], ["goodbye"])


@check
def both_ways_at_once(talk):
    words = ("x" * 1000 + str(turn) for turn in range(2000))
    answers = [each.value for each in talk.chat((text(each) for each in words), timeout=LIMIT_S)]
    same(len(answers), 2001)
    same(answers[1999][-4:], "1999")


@check
def the_server_ends_first(talk):
    """The response is complete although the client has not sent everything."""
    goes_on = threading.Event()

    def words():
        yield text("this")
        goes_on.wait(LIMIT_S)

    answers = talk.first(words(), timeout=LIMIT_S)
    same([each.value for each in answers], ["enough of this"])
    same(answers.code(), grpc.StatusCode.OK)
    goes_on.set()


@check
def every_status(talk):
    for code in grpc.StatusCode:
        value = code.value[0]
        if value == 0:
            continue
        error = error_of(lambda: talk.fail(number(value), timeout=LIMIT_S))
        same((error.code(), error.details()), (code, f"status {value}: 100 % broken, naïve café"))
        same(dict(error.trailing_metadata()).get("x-why-bin"), b"\x00\xff\x80")


@check
def a_status_behind_messages(talk):
    answers, seen = talk.fail_late(number(9), timeout=LIMIT_S), []
    error = error_of(lambda: [seen.append(each.value) for each in answers])
    same((seen, error.code()), ([0, 1], grpc.StatusCode.FAILED_PRECONDITION))


@check
def an_absent_method(talk):
    same(error_of(lambda: talk.absent(text(""), timeout=LIMIT_S)).code(), grpc.StatusCode.UNIMPLEMENTED)


@check
def the_server_sees_the_deadline(talk):
    left_ms = talk.remaining(text(""), timeout=LIMIT_S).value
    # The library rounds the deadline up before it sends it.
    if not 0 < left_ms <= LIMIT_S * 1000 + 1000:
        raise AssertionError(f"{left_ms} ms left of {LIMIT_S} s")


@check
def a_deadline(talk):
    """The client gives up at its deadline, and the server notices."""
    name = str(uuid.uuid4())
    start = time.monotonic()
    error = error_of(lambda: talk.wait(text(name), timeout=1))
    same(error.code(), grpc.StatusCode.DEADLINE_EXCEEDED)
    if time.monotonic() - start > LIMIT_S:
        raise AssertionError("gave up too late")
    outcome = talk.outcome(text(name), timeout=LIMIT_S).value
    if outcome not in ("cancelled", "out of time"):
        raise AssertionError(f"the server saw the call {outcome}")


@check
def cancelled_before_an_answer(talk):
    name = str(uuid.uuid4())
    call = talk.wait.future(text(name), timeout=4 * LIMIT_S)
    # A call that is cancelled early is never sent.
    same(talk.started(text(name), timeout=LIMIT_S).value, "running")
    call.cancel()
    same(talk.outcome(text(name), timeout=LIMIT_S).value, "cancelled")


@check
def cancelled_within_a_stream(talk):
    name = str(uuid.uuid4())
    answers = talk.tick(text(name), timeout=4 * LIMIT_S)
    same(next(answers).value, "started")
    answers.cancel()
    same(talk.outcome(text(name), timeout=LIMIT_S).value, "cancelled")


@check
def a_hundred_at_once(talk):
    calls = [talk.echo.future(BytesValue(value=b"%d" % each), timeout=LIMIT_S) for each in range(100)]
    same([call.result().value for call in calls], [b"%d" % each for each in range(100)])


@check
def reflection_describes_the_service(talk):
    stub = reflection_pb2_grpc.ServerReflectionStub(talk.channel)
    ask = reflection_pb2.ServerReflectionRequest
    questions = [ask(list_services=""), ask(file_containing_symbol=SERVICE)]
    listed, described = stub.ServerReflectionInfo(iter(questions), timeout=LIMIT_S)
    names = {service.name for service in listed.list_services_response.service}
    if SERVICE not in names:
        raise AssertionError(f"only {names}")
    files = described.file_descriptor_response.file_descriptor_proto
    methods = [
        method.name
        for file in map(descriptor_pb2.FileDescriptorProto.FromString, files)
        for service in file.service
        for method in service.method
    ]
    if "Echo" not in methods or "Chat" not in methods:
        raise AssertionError(f"only {methods}")


@check
def health_is_reported(talk):
    stub, serving = health_pb2_grpc.HealthStub(talk.channel), health_pb2.HealthCheckResponse.SERVING
    ask = health_pb2.HealthCheckRequest(service=SERVICE)
    same(stub.Check(ask, timeout=LIMIT_S).status, serving)
    watching = stub.Watch(ask, timeout=4 * LIMIT_S)
    same(next(watching).status, serving)
    watching.cancel()


def refused(talk):
    """A rate limit refuses all kinds of calls with a gRPC status."""
    calls = {
        "unary": lambda: talk.echo(BytesValue(value=b"x"), timeout=LIMIT_S),
        "server stream": lambda: list(talk.count(number(3), timeout=LIMIT_S)),
        "client stream": lambda: talk.total(iter([number(1)] * 100), timeout=LIMIT_S),
        "both ways": lambda: list(talk.chat(iter([text("x")] * 100), timeout=LIMIT_S)),
    }
    for name, call in calls.items():
        error = error_of(call)
        same((name, error.code()), (name, grpc.StatusCode.RESOURCE_EXHAUSTED))
        if not error.details():
            raise AssertionError(f"{name}: without a word")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="PEM file of the authority; speaks TLS")
    parser.add_argument("--name", default="localhost", help="what the certificate says (default localhost)")
    parser.add_argument("--refused", action="store_true", help="a rate limit is used up")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks only")
    options = parser.parse_args()
    checks = CHECKS
    if options.refused:
        checks = [("refused", refused)]
    elif options.only:
        checks = [(name, function) for name, function in CHECKS if name in options.only]
    broken = 0
    with channel(options) as open_channel:
        talk = Talk(open_channel)
        for name, function in checks:
            broken += not held(name, function, talk)
    sys.exit(1 if broken or not checks else 0)


def channel(options):
    # Proxies of the environment are not used.
    settings = [("grpc.enable_http_proxy", 0)]
    if not options.ca:
        return grpc.insecure_channel(options.target, settings)
    with open(options.ca, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    settings.append(("grpc.ssl_target_name_override", options.name))
    return grpc.secure_channel(options.target, credentials, settings)


def held(name, function, talk):
    try:
        function(talk)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{each.name}:{each.lineno}" for each in where if each.filename == __file__]
        print(f"FAILED {name}: {type(error).__name__} {error} ({', '.join(lines)})", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


if __name__ == "__main__":
    main()
