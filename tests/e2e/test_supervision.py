"""An engine that dies: the worker keeps its place, and nobody's job is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from lenspool import Client, Job, keys
from lenspool.broker import Broker
from tests.e2e.test_life import broker, group_gone, served, tiny, worker  # noqa: F401


def children(pid: int, name: str) -> list[psutil.Process]:
    """vLLM's processes of a worker, by the title that they give themselves."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


async def counters(client: Client) -> dict[str, Any]:
    (row,) = await client.status()
    (entry,) = row["workers"]
    return entry


async def started(job: Job[Any]) -> None:
    """Wait until a worker runs it; fails if it is over before that is seen."""
    async with asyncio.timeout(60):
        while (status := await job.status()) != "started":
            assert status == "queued"
            await asyncio.sleep(0.01)


async def cards(client: Client) -> list[bytes]:
    names = await client._queue.redis.zrange(keys.CARDS, 0, -1)
    return await client._queue.redis.mget([keys.card(name.decode()) for name in names])


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


async def test_dead_engine_is_restarted_and_a_hopeless_one_given_up(
    tiny: Path,  # noqa: F811
    broker: Broker,  # noqa: F811
    tmp_path: Path,
) -> None:
    model = tmp_path / "Tiny_Llama"
    shutil.copytree(tiny, model)
    async with Client(broker.url, store=tmp_path / "store") as client:
        with worker(model, broker.url, tmp_path / "store", "--metrics-port", "0") as process:
            await served(client)
            handles = [
                await client.submit_generate([5, i], max_tokens=300, ignore_eos=True, hooks="resid_post.1")
                for i in range(40)
            ]
            jobs = [asyncio.create_task(handle.result()) for handle in handles]
            await started(handles[-1])
            (child,) = children(process.pid, "VLLM::Worker")
            child.kill()
            states = set()
            async with asyncio.timeout(200):
                while not all(job.done() for job in jobs):
                    states.add((await counters(client)).get("state", "serving"))  # the card is there all the time
                    await asyncio.sleep(0.2)
            for i, generation in enumerate([job.result() for job in jobs]):
                assert generation.prompt_token_ids == [5, i] and len(generation.token_ids) == 300
                assert generation["resid_post.1"].shape == (301, 128)
            assert states == {"serving", "restarting"}
            after = await counters(client)
            assert (after["restarts"], after["requeued"] > 0, after["fenced"], process.poll()) == (1, True, 0, None)

            (published,) = [json.loads(raw) for raw in await cards(client)]
            metrics: dict[str, float] = {}
            async with asyncio.timeout(10):  # they are read from the card, each second
                while metrics.get("lenspool_committed_total", 0) < 40:
                    metrics = await asyncio.to_thread(scraped, published["metrics_port"])
                    await asyncio.sleep(0.2)
            assert metrics["lenspool_restarts_total"] == 1 and metrics["lenspool_serving"] == 1
            assert metrics["lenspool_tokens_total"] > 0

            # now it cannot come back
            (model / "config.json").unlink()
            job = await client.submit_generate([9, 9], max_tokens=400, ignore_eos=True)
            await started(job)
            (core,) = children(process.pid, "VLLM::EngineCore")
            os.kill(core.pid, signal.SIGKILL)
            assert await asyncio.to_thread(process.wait, 90) == 1
            assert await job.status() == "queued"
            await group_gone(process.pid)
            assert await client.status() == []

        # the job that was given back, under stock rq
        shutil.copy(tiny / "config.json", model / "config.json")
        places = {"LENSPOOL_MODEL": model, "LENSPOOL_STORE": tmp_path / "store", "LENSPOOL_REDIS": broker.url}
        command = [sys.executable, "-m", "rq.cli", "worker", "--burst", "--url", broker.url]
        command += ["-S", "rq.serializers.JSONSerializer", keys.queue_name(job._request.card.id)]
        environment = os.environ | {name: str(value) for name, value in places.items()}
        stock = await asyncio.create_subprocess_exec(*command, env=environment)
        assert await asyncio.wait_for(stock.wait(), 200) == 0
        assert await job.status() == "finished"
        assert len((await job.result()).token_ids) == 400
