#!/usr/bin/env python3
"""Tests the rate limit service with the common gRPC library, which learns the messages by reflection.

    ratelimit_client.py HOST:PORT [--ca FILE]

Expects a rule `per-user` of 3 a minute for the descriptor `user` of the domain `api`. Prints `ok NAME` or `FAILED NAME: why`
for each check, and fails if one of them failed.
"""

import argparse
import queue
import sys
import traceback

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
LIMIT_S = 20
CHECKS = []


def check(function):
    CHECKS.append((function.__name__, function))
    return function


def assert_equal(actual, expected):
    if actual != expected:
        raise AssertionError(f"{str(actual)[:500]} instead of {str(expected)[:500]}")


class Service:
    """The service, as reflection describes it."""

    def __init__(self, channel):
        self.channel = channel
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self.pool = DescriptorPool(self.database)
        method = self.pool.FindServiceByName(SERVICE).FindMethodByName("ShouldRateLimit")
        self.request = GetMessageClass(method.input_type)
        self.call = channel.unary_unary(
            f"/{SERVICE}/ShouldRateLimit",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )

    def ask(self, *descriptors, domain="api", **more):
        request = self.request(domain=domain, **more)
        for entries in descriptors:
            descriptor = request.descriptors.add()
            for key, value in entries.items():
                descriptor.entries.add(key=key, value=value)
        return self.call(request, timeout=LIMIT_S)


def error_of(call):
    try:
        response = call()
    except grpc.RpcError as error:
        return error.code()
    raise AssertionError(f"the call returned {response} instead of an error")


@check
def all_services_are_listed(service):
    assert_equal(
        sorted(service.database.get_services()),
        [SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"],
    )


@check
def files_are_found_by_symbol(service):
    for name in ("RateLimitRequest", "RateLimitResponse.DescriptorStatus", "RateLimitResponse.Code"):
        service.pool.FindFileContainingSymbol(f"envoy.service.ratelimit.v3.{name}")


@check
def an_unknown_symbol_is_an_error_response(service):
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    requests = queue.SimpleQueue()
    responses = stub.ServerReflectionInfo(iter(requests.get, None), timeout=LIMIT_S)
    for _ in range(3):
        requests.put(reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.Such"))
        assert_equal(next(responses).error_response.error_code, 5)
    requests.put(None)
    assert_equal(list(responses), [])


@check
def the_limit_holds(service):
    codes = [service.ask({"user": "a"}).overall_code for _ in range(5)]
    assert_equal(codes, [1, 1, 1, 2, 2])


@check
def the_status_tells_the_window(service):
    response = service.ask({"user": "b"}, {"other": "b"}, hits_addend=2)
    assert_equal([status.code for status in response.statuses], [1, 1])
    status = response.statuses[0]
    assert_equal((status.current_limit.requests_per_unit, status.current_limit.name), (3, "per-user"))
    assert_equal(status.current_limit.Unit.Name(status.current_limit.unit), "MINUTE")
    assert_equal(status.limit_remaining, 1)
    if not 0 < status.duration_until_reset.seconds <= 60:
        raise AssertionError(status.duration_until_reset)
    assert_equal(response.statuses[1].HasField("current_limit"), False)
    fields = {header.key: header.value for header in response.response_headers_to_add}
    assert_equal(fields["ratelimit-policy"], '"per-user";q=3;w=60')


@check
def a_request_without_descriptors_is_invalid(service):
    assert_equal(error_of(service.ask), grpc.StatusCode.INVALID_ARGUMENT)


@check
def compression_is_refused(service):
    request = service.request(domain="api")
    request.descriptors.add().entries.add(key="user", value="c" * 10_000)
    call = lambda: service.call(request, timeout=LIMIT_S, compression=grpc.Compression.Gzip)
    assert_equal(error_of(call), grpc.StatusCode.UNIMPLEMENTED)


@check
def an_absent_method_is_unimplemented(service):
    call = service.channel.unary_unary(f"/{SERVICE}/Absent", None, None)
    assert_equal(error_of(lambda: call(b"", timeout=LIMIT_S)), grpc.StatusCode.UNIMPLEMENTED)


@check
def the_service_is_healthy(service):
    stub = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", SERVICE):
        request = health_pb2.HealthCheckRequest(service=name)
        assert_equal(stub.Check(request, timeout=LIMIT_S).status, health_pb2.HealthCheckResponse.SERVING)
        watch = stub.Watch(request, timeout=LIMIT_S)
        assert_equal(next(watch).status, health_pb2.HealthCheckResponse.SERVING)
        watch.cancel()
    unknown = health_pb2.HealthCheckRequest(service="unknown")
    assert_equal(error_of(lambda: stub.Check(unknown, timeout=LIMIT_S)), grpc.StatusCode.NOT_FOUND)
    watch = stub.Watch(unknown, timeout=LIMIT_S)
    assert_equal(next(watch).status, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
    watch.cancel()


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("address")
    arguments.add_argument("--ca")
    arguments = arguments.parse_args()
    if arguments.ca:
        with open(arguments.ca, "rb") as file:
            credentials = grpc.ssl_channel_credentials(file.read())
        channel = grpc.secure_channel(
            arguments.address, credentials, [("grpc.ssl_target_name_override", "localhost")]
        )
    else:
        channel = grpc.insecure_channel(arguments.address)
    failed = False
    with channel:
        service = Service(channel)
        for name, function in CHECKS:
            try:
                function(service)
                print(f"ok {name}")
            except Exception:
                failed = True
                print(f"FAILED {name}: {traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
