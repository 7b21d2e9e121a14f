"""An OpenTelemetry collector: a real HTTP server that keeps the spans it is sent."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.api.launch import wait_until


class SpanCollector:
    """Attributes: `url`: to export to; `spans`: in the order in which they came."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def span_of(self, request_id: str) -> Span:
        """The span of a request, once it has come."""
        wait_until(lambda: bool(self._found(request_id)), f"no span of {request_id} came")
        [span] = self._found(request_id)
        return span

    def _found(self, request_id: str) -> list[Span]:
        return [s for s in self.spans if attributes(s)["gen_ai.request.id"] == request_id]


def attributes(span: Span) -> dict[str, object]:
    """Key the attribute's name."""
    return {attribute.key: _value(attribute.value) for attribute in span.attributes}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting_spans() -> Iterator[SpanCollector]:
    collector = SpanCollector()
    thread = Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()
