"""OpenTelemetry: a call's span and that of the worker's run are one trace, by way of the job in Redis."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from lenspool import spans
from lenspool.errors import InvalidJob
from lenspool.submission import JOB_PREFIX
from lenspool.terms import Terms
from lenspool.testing import FakePool
from lenspool_worker.pool_worker import PoolWorker
from tests.queue.conftest import CARD, Connect, Pool, doc

trace = pytest.importorskip("opentelemetry.trace", reason="an extra")
export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="a development tool")


@pytest.fixture(scope="module")
def exporter() -> Any:
    """Of the SDK, set up as a program would; once, as a process has one provider."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    found = export.InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


@pytest.fixture
def ended(exporter: Any) -> Iterator[Any]:
    exporter.clear()
    yield exporter.get_finished_spans
    exporter.clear()


async def test_a_call_has_a_span_with_its_answer(ended: Any) -> None:
    client = FakePool().client()
    await client.capture("abc", "resid_post.*")
    await client.generate("abc", max_tokens=2)
    capture, generate = ended()
    assert (capture.name, generate.name) == ("lenspool.capture", "lenspool.generate")
    assert capture.kind is trace.SpanKind.CLIENT and capture.attributes["lenspool.tokens"] == 3
    assert capture.attributes["lenspool.cached"] is True and capture.attributes["lenspool.computed_rows"] == 0
    assert capture.attributes["lenspool.model"] == FakePool().card.id


async def test_the_workers_span_is_a_child_of_the_calls(pool: Pool, connect: Connect, ended: Any) -> None:
    async def handler(document: dict[str, Any], job_id: str) -> dict[str, Any]:
        if document["n"] == "bad":
            raise InvalidJob("n", "is bad")
        return {"computed_rows": 5, "run_s": 0.25}

    worker = PoolWorker({"id": CARD}, handler, connection=redis.Redis.from_url(pool.url))
    serving = asyncio.create_task(worker.serve())
    tracer = trace.get_tracer("a program")
    async with asyncio.timeout(60), connect() as queue:
        with tracer.start_as_current_span("call") as call:
            ticket = queue.submit(CARD, doc("good"), Terms(trace=spans.traceparent()))
            await ticket.result()
            with pytest.raises(InvalidJob):
                await queue.submit(CARD, doc("bad"), Terms(trace=spans.traceparent())).result()
        carried = pool.redis.hget(JOB_PREFIX + ticket.id, "traceparent").decode()
        assert f"-{call.get_span_context().trace_id:032x}-{call.get_span_context().span_id:016x}-" in carried
        await queue.submit(CARD, doc("alone")).result()
        garbage = queue.submit(CARD, doc("garbage"), Terms(trace="00-zz\x00" * 50))
        await garbage.result()
        worker.stop()
        await serving
    runs = {span.attributes["lenspool.job_id"]: span for span in ended() if span.name == "lenspool.job"}
    good, bad = runs[ticket.id], next(span for span in runs.values() if span.status.status_code.name == "ERROR")
    for span in (good, bad):
        assert span.parent.span_id == call.get_span_context().span_id and span.parent.is_remote
        assert span.context.trace_id == call.get_span_context().trace_id
    assert good.kind is trace.SpanKind.CONSUMER
    assert good.attributes["lenspool.computed_rows"] == 5 and good.attributes["lenspool.lane"] == "interactive"
    assert "is bad" in bad.events[0].attributes["exception.message"]
    assert len(runs) == 4 and runs[garbage.id].parent is None


def test_without_opentelemetry_nothing_is_traced() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import asyncio; from lenspool import spans; from lenspool.testing import FakePool\n"
        "r = asyncio.run(FakePool().client().capture('abc', 'resid_post.0'))\n"
        "print(len(r.token_ids), repr(spans.traceparent()))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["3", "''"]


@pytest.mark.parametrize(("exporter", "words"), [("console", '"service.name": "mine"'), ("carrier-pigeon", "console")])
def test_a_program_exports_where_the_environment_says(exporter: str, words: str) -> None:
    """And says what there is where it cannot."""
    code = (
        "import asyncio, logging; logging.basicConfig(); from lenspool.span_export import export_spans\n"
        "from lenspool.testing import FakePool\n"
        "export_spans('mine'); asyncio.run(FakePool().client().capture('abc', 'resid_post.0'))"
    )
    env = {**os.environ, "OTEL_TRACES_EXPORTER": exporter}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert words in answer.stdout + answer.stderr
    assert ('"name": "lenspool.capture"' in answer.stdout) == (exporter == "console")
