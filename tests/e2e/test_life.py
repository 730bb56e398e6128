"""A pool's life: stopped in the middle of work, nothing is lost; with a second worker nobody notices a death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
import transformers
from opentelemetry.sdk.trace import TracerProvider

import lenspool
import lenspool.sync
from lenspool import Client, PoolUnavailable
from lenspool.broker import Broker
from tests import tiny_llama
from tests.e2e.collector import collector
from tests.e2e.conftest import relative

HOOKS = ["blocks.*.hook_resid_post", "logits"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "Tiny_Llama")


@contextlib.contextmanager
def worker(
    tiny: Path, url: str, store: Path, *options: str, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker as `lenspool worker` starts it; killed at the end if it still runs."""
    command = [sys.executable, "-m", "lenspool.cli", "worker", "--no-compiled", "--model", str(tiny)]
    command += ["--redis", url, "--store", str(store), *options]
    process = subprocess.Popen(command, start_new_session=True, stdout=stdout)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def served(client: Client, workers: int = 1) -> None:
    """Wait until that many workers serve."""
    async with asyncio.timeout(240):
        while sum(len(row["workers"]) for row in await client.status()) < workers:
            await asyncio.sleep(0.2)


async def group_gone(group: int) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.1)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Spans that pools export which are started meanwhile."""
    with collector() as (address, found):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        yield found


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    with Broker() as running:
        yield running


async def test_sigterm_in_the_middle_of_work_loses_nothing(tiny: Path, broker: Broker, tmp_path: Path) -> None:
    async with Client(broker.url, store=tmp_path / "store") as client:
        with worker(tiny, broker.url, tmp_path / "store", "--json", stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            said = json.loads(await asyncio.wait_for(asyncio.to_thread(first.stdout.readline), 240))
            card = await client.card()
            assert said == {"redis": broker.url, "model": card.id, "store": str(tmp_path / "store")}
            assert card.name == "tiny-llama" and card.tokenizer is None
            long = [
                asyncio.create_task(client.generate([5, i], max_tokens=400, ignore_eos=True, hooks="resid_post.1"))
                for i in range(100)
            ]
            await asyncio.sleep(1.5)
            first.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            late = [asyncio.create_task(client.capture([7, i, 9], HOOKS)) for i in range(20)]
            assert await asyncio.to_thread(first.wait, 60) == 0
            await group_gone(first.pid)
        with worker(tiny, broker.url, tmp_path / "store"):
            generations = await asyncio.wait_for(asyncio.gather(*long), 240)
            captures = await asyncio.wait_for(asyncio.gather(*late), 240)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    for i, capture in enumerate(captures):
        with torch.no_grad():
            expected = model(torch.tensor([[7, i, 9]]), output_hidden_states=True)
        assert relative(capture["resid_post.0"], expected.hidden_states[1][0].numpy()) <= 1e-5
        assert relative(capture["logits"], expected.logits[0].numpy()) <= 1e-5
    for i, generation in enumerate(generations):
        assert generation.prompt_token_ids == [5, i] and len(generation.token_ids) == 400
        assert generation["resid_post.1"].shape == (401, 128)


async def test_killed_worker_is_not_noticed_when_there_is_another(tiny: Path, broker: Broker, tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with Client(broker.url, store=store) as client:
        with worker(tiny, broker.url, store) as one, worker(tiny, broker.url, store):
            await served(client, 2)
            tasks = [
                asyncio.create_task(client.generate([3, i % 250, i // 250], max_tokens=200, ignore_eos=True))
                for i in range(300)
            ]
            await asyncio.sleep(2.0)
            began = time.monotonic()
            os.killpg(one.pid, signal.SIGKILL)
            results = await asyncio.wait_for(asyncio.gather(*tasks), 300)
            assert [r.prompt_token_ids for r in results] == [[3, i % 250, i // 250] for i in range(300)]
            assert all(len(r.token_ids) == 200 for r in results)
            assert time.monotonic() - began < 240


async def test_without_a_worker_a_call_fails_instead_of_hanging(broker: Broker) -> None:
    async with Client(broker.url, model="tiny-llama", patience=2.0) as client:
        with pytest.raises(lenspool.UnknownModel):
            await client.capture([1, 2], HOOKS)
    with pytest.raises(PoolUnavailable):
        async with Client("unix:///nonexistent/redis.sock", patience=1.0):
            pass


def test_sync_twin_and_embedded_pool(tiny: Path, tmp_path: Path, spans: list[tuple[str, Any]]) -> None:
    options = {"name": "mine", "client_queue": 7, "metrics_port": 0}
    tracer = TracerProvider().get_tracer("a script")
    with lenspool.sync.connect_local(tiny, store=tmp_path / "store", **options) as client:
        with tracer.start_as_current_span("experiment") as experiment:
            first = client.capture([1, 2, 3], HOOKS)
        assert first["logits"].shape == (3, 1000)
        assert [r.cached for r in client.map([[1, 2, 3], [4]], HOOKS)] == [True, False]
        assert client.models()[0].name == "mine"
        with pytest.raises(lenspool.InvalidJob, match="tokenizer"):
            client.capture("text", HOOKS)
        url = client._client.url
        with redis.Redis.from_url(url) as server:
            (limits,), (card,) = (server.keys(f"lenspool:{kind}:*") for kind in ("limits", "card"))
            assert server.hget(limits, "client") == b"7"
            assert json.loads(server.get(card))["metrics_port"] > 0
    assert not Path(url.removeprefix("unix://")).exists()
    trace = experiment.get_span_context().trace_id
    ((service, run),) = [(service, span) for service, span in spans if int.from_bytes(span.trace_id, "big") == trace]
    assert (service, run.name) == ("lenspool-worker", "lenspool.job") and run.parent_span_id
    told = {pair.key: pair.value for pair in run.attributes}
    assert told["lenspool.computed_rows"].int_value == first.provenance["computed_rows"]


def test_embedded_pool_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "nothing"}')
    with pytest.raises(PoolUnavailable, match="did not start"), lenspool.sync.connect_local(tmp_path, store=tmp_path):
        pass


async def test_a_stream_goes_on_when_its_worker_is_killed(tiny: Path, broker: Broker, tmp_path: Path) -> None:
    """Each token once: of the greedy ones the second attempt's follow; another sample is not mixed in."""
    store = tmp_path / "store"
    async with Client(broker.url, store=store) as client, Client(broker.url, store=store) as other:
        with worker(tiny, broker.url, store) as first:
            await served(client)
            options = {"max_tokens": 500, "ignore_eos": True}
            streams = [client.stream([3, i], **options) for i in range(6)]  # type: ignore[arg-type]
            streams += [other.stream([3, 0], **options)]  # type: ignore[arg-type]
            streams += [client.stream([3, 1], temperature=1.0, **options)]  # type: ignore[arg-type]
            yielded: list[list[int]] = [[] for _ in streams]

            async def read(stream: lenspool.TokenStream, out: list[int]) -> None:
                async for delta in stream:
                    assert delta.index == len(out)
                    out += delta.token_ids

            reading = asyncio.gather(*map(read, streams, yielded))
            async with asyncio.timeout(60):
                while not all(len(out) > 3 for out in yielded):
                    await asyncio.sleep(0.01)
            os.killpg(first.pid, signal.SIGKILL)
            assert not reading.done()
        before = [len(out) for out in yielded]
        with worker(tiny, broker.url, store):
            await asyncio.wait_for(reading, 240)
    assert all(count < 500 for count in before)
    for stream, out in zip(streams[:-1], yielded, strict=False):
        assert stream.token_ids == out == stream.result.token_ids and stream.exact and len(out) == 500
    sampled = streams[-1]
    assert len(sampled.result.token_ids) == 500
    assert not sampled.exact and sampled.token_ids == yielded[-1] != sampled.result.token_ids
