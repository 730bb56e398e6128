"""A collector of OpenTelemetry spans, as far as the tests need one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Its address (OTLP over HTTP), and the spans that have come, each with the service that it is of."""
    spans: list[tuple[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for group in request.resource_spans:
                about = {pair.key: pair.value.string_value for pair in group.resource.attributes}
                spans.extend((about["service.name"], span) for scope in group.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not into the tests' output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()
        serving.join()
