"""The worker's counters for Prometheus; the same numbers as on its card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_COUNTERS = {
    "claimed": "Jobs taken from the queue.",
    "committed": "Jobs whose end was written.",
    "requeued": "Jobs given back: retries, and those of a worker that left.",
    "fenced": "Results dropped, as the job was another worker's by then.",
    "restarts": "Restarts of the engine.",
    "steps": "Steps of the engine.",
    "tokens": "Tokens that the engine ran.",
    "preemptions": "Requests that vLLM preempted.",
    "bytes_written": "Bytes of rows written into the store.",
    "computed_rows": "Rows that jobs computed.",
    "reused_rows": "Rows that jobs found in the store.",
}
_GAUGES = {
    "in_flight": "Jobs in the worker's hands.",
    "live": "Requests in the engine.",
    "max_batch": "Most requests in one step so far.",
    "held_bytes": "Bytes of rows that wait to be stored.",
}


class WorkerMetrics(Collector):
    """Reads the card at each scrape."""

    def __init__(self, published: Mapping[str, Any]) -> None:
        self._published = published

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now; counters of an engine that has been restarted begin again."""
        stats: Mapping[str, Any] = self._published.get("stats", {})
        labels = {"model": str(self._published["id"]), "worker": str(self._published["worker"])}
        names, values = list(labels), list(labels.values())
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"lenspool_{name}", text, labels=names)
            counter.add_metric(values, float(stats.get(name, 0)))
            yield counter
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"lenspool_{name}", text, labels=names)
            gauge.add_metric(values, float(stats.get(name, 0)))
            yield gauge
        serving = GaugeMetricFamily("lenspool_serving", "1 while the engine runs, 0 while it restarts.", labels=names)
        serving.add_metric(values, float(stats.get("state") == "serving"))
        yield serving
        failures = CounterMetricFamily("lenspool_failed", "Jobs that failed, by error.", labels=[*names, "error"])
        for error, count in dict(stats.get("failures", {})).items():
            failures.add_metric([*values, error], float(count))
        yield failures


@contextlib.contextmanager
def endpoint(published: Mapping[str, Any], port: int | None) -> Iterator[int | None]:
    """Serve `/metrics` on a loopback port for as long as the context lives; yields the port."""
    if port is None:
        yield None
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WorkerMetrics(published))
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
