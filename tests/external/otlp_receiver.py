#!/usr/bin/env python3
"""A receiver of OTLP over gRPC for the tests, with OpenTelemetry's own protobuf definitions.

    otlp_receiver.py FILE [--tls CERTIFICATE KEY] [--port PORT]

Listens on PORT, or on a port that the system chooses, and prints `listening on 127.0.0.1:PORT`. Appends each
span to FILE as a JSON object on a line. The receiver does not depend on the gateway.
"""

import argparse
import json
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


def value_of(value):
    """The value of an attribute."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)


def attributes_of(owner):
    names = [attribute.key for attribute in owner.attributes]
    assert len(names) == len(set(names)), f"an attribute occurs twice: {names}"
    return {attribute.key: value_of(attribute.value) for attribute in owner.attributes}


def describe(span, resource, scope, metadata):
    assert len(span.trace_id) == 16 and len(span.span_id) == 8 and len(span.parent_span_id) in (0, 8)
    return {
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex() or None,
        "trace_state": span.trace_state,
        "name": span.name,
        "kind": Span.SpanKind.Name(span.kind),
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "attributes": attributes_of(span),
        "events": [{"name": event.name, "attributes": attributes_of(event)} for event in span.events],
        "status": Status.StatusCode.Name(span.status.code),
        "resource": attributes_of(resource),
        "scope": scope.name,
        "authorization": metadata.get("authorization"),
    }


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, file):
        self._file = file

    def Export(self, request, context):
        metadata = dict(context.invocation_metadata())
        for of_resource in request.resource_spans:
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    line = json.dumps(describe(span, of_resource.resource, of_scope.scope, metadata))
                    self._file.write(line + "\n")
        self._file.flush()
        return trace_service_pb2.ExportTraceServiceResponse()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files; default: cleartext")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    # One thread, so that lines do not mix.
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Receiver(open(options.file, "a")), server)
    address = f"127.0.0.1:{options.port}"
    if options.tls:
        certificate, key = (open(name, "rb").read() for name in options.tls)
        port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
    else:
        port = server.add_insecure_port(address)
    server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
