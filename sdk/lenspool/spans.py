"""OpenTelemetry spans, where its API is installed: one for a client's call, one for a worker's run of the job.

The job carries the trace context of who asked for it first (W3C `traceparent`), so the worker's span is a child of that
client's. What is recorded, and where it goes, is the OpenTelemetry SDK's, set up by the program, or for the worker and
the commands by `lenspool.span_export`; without an SDK nothing is.

| span | kind | attributes |
|---|---|---|
| `lenspool.capture`, `lenspool.generate`, `lenspool.submit` | client | `lenspool.model`, `.tokens`, `.hooks`; then \
`.cached`, `.computed_rows`, `.queue_s`, `.run_s`, `.worker` |
| `lenspool.job` | consumer | `lenspool.model`, `.job_id`, `.kind`, `.tokens`, `.lane`; then `.computed_rows` |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenspool.job import Request


@functools.cache
def _api() -> Any:
    """The module `opentelemetry.trace`; None where it is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


@functools.cache
def _context_format() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()


@contextlib.contextmanager
def _span(name: str, kind: str, attributes: Mapping[str, Any], parent: str = "") -> Iterator[Any]:
    """A span that is current while the context lives; None without OpenTelemetry. An error that leaves it is kept."""
    api = _api()
    if api is None:
        yield None
        return
    context = _context_format().extract({"traceparent": parent}) if parent else None
    named = {f"lenspool.{key}": value for key, value in attributes.items() if value is not None}
    tracer = api.get_tracer("lenspool")
    with tracer.start_as_current_span(name, context, getattr(api.SpanKind, kind), named) as span:
        yield span


def asking(request: Request, name: str = "") -> contextlib.AbstractContextManager[Any]:
    """The span of a client's call."""
    name = name or ("capture" if request.sampling is None else "generate")
    sizes = {"model": request.card.id, "tokens": len(request.tokens), "hooks": len(request.hooks)}
    return _span(f"lenspool.{name}", "CLIENT", sizes)


def answered(span: Any, cached: bool, provenance: Mapping[str, Any]) -> None:
    """Say how a call was answered."""
    if span is not None:
        _tell(span, {"cached": cached, **{name: provenance[name] for name in _ANSWER}})


_ANSWER = ("computed_rows", "queue_s", "run_s", "worker")


def traceparent() -> str:
    """The current span as a job carries it; empty when nothing is recorded."""
    carrier: dict[str, str] = {}
    if _api() is not None:
        _context_format().inject(carrier)
    return carrier.get("traceparent", "")


@contextlib.contextmanager
def running(job_id: str, document: Mapping[str, Any], lane: str, parent: str) -> Iterator[Any]:
    """The span of a worker's run of a job; `parent` is what the job carries."""
    about = {"job_id": job_id, "lane": lane or None, "model": document.get("model"), "kind": document.get("kind")}
    about = {name: value for name, value in about.items() if isinstance(value, str)}
    with _span("lenspool.job", "CONSUMER", about, parent) as span:
        yield span


def ran(span: Any, value: Mapping[str, Any]) -> None:
    """Say what a run brought."""
    if span is not None:
        _tell(span, {name: value.get(name) for name in ("computed_rows", "reused_rows", "run_s")})


def _tell(span: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is not None:
            span.set_attribute(f"lenspool.{name}", value)
