"""Where the spans of lenspool's own programs go: as OpenTelemetry's environment variables say.

A script sets OpenTelemetry up itself, if it wants any of it; the worker and the commands are programs, and so do that
for themselves when `OTEL_TRACES_EXPORTER` or `OTEL_EXPORTER_OTLP_ENDPOINT` (or `..._TRACES_ENDPOINT`) is set.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os

log = logging.getLogger(__name__)

_GROUP = "opentelemetry_traces_exporter"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def export_spans(service: str) -> None:
    """Have this process's spans exported, where the environment asks for it and nothing else was set up before.

    What is missing is said in the log, and stops nothing.

    Parameters
    ----------
    service
        `service.name` of the spans, unless `OTEL_SERVICE_NAME` says otherwise.
    """
    wanted = [name for name in _exporters() if name != "none"]
    if not wanted or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("spans are not exported: OpenTelemetry's SDK is missing; pip install 'lenspool[otel]'")
        return
    if isinstance(trace.get_tracer_provider(), TracerProvider):  # by `opentelemetry-instrument`
        return
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named))  # which is flushed at the end of the process
    for name in wanted:
        found = list(importlib.metadata.entry_points(group=_GROUP, name=name))
        if not found:
            there = ", ".join(sorted({point.name for point in importlib.metadata.entry_points(group=_GROUP)}))
            log.warning("spans are not exported to %r: no such exporter is installed; there are %s", name, there)
            continue
        provider.add_span_processor(BatchSpanProcessor(found[0].load()()))
    trace.set_tracer_provider(provider)


def _exporters() -> list[str]:
    told = os.environ.get("OTEL_TRACES_EXPORTER")
    if not told:
        return [_otlp()] if any(os.environ.get(name) for name in _ENDPOINTS) else []
    return [_otlp() if name == "otlp" else name for name in (part.strip() for part in told.split(",")) if name]


def _otlp() -> str:
    protocol = next((found for name in _PROTOCOLS if (found := os.environ.get(name))), "grpc")
    return "otlp_proto_http" if protocol.startswith("http") else "otlp_proto_grpc"
