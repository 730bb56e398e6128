"""Submitted jobs: `submit_capture`, `submit_generate` and `client.job(id)`, also from another process."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import pytest

from lenspool import Client, InvalidJob, Job, JobCancelled, add, keys

HOOKS = ["resid_post.3", "resid_post.7"]

SCRIPT = """
import asyncio, json, sys
from lenspool import Client, add

async def main(url):
    async with Client(url) as client:
        direction = [1.0] * 576
        capture = await client.submit_capture("Left by its script", ["resid_post.3", "resid_post.7"], positions=[0, -1],
                                              interventions=add("resid_post.2", direction))
        generation = await client.submit_generate("Left, too", max_tokens=5, hooks="resid_post.3", priority="batch")
        print(json.dumps([capture.id, generation.id]))

asyncio.run(main(sys.argv[1]))
"""


async def left_by_a_script(client: Client) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, client.url, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    ids: list[str] = json.loads(out)
    return ids


async def test_found_again_by_another_process(client: Client) -> None:
    first, second = (client.job(job_id) for job_id in await left_by_a_script(client))
    capture, generation = await asyncio.gather(first.result(), second.result())
    edit = add("resid_post.2", np.ones(576))
    same = await client.capture("Left by its script", HOOKS, positions=[0, -1], interventions=edit)
    assert same.cached
    assert capture.hooks == same.hooks and capture.positions.tolist() == same.positions.tolist()
    for hook in HOOKS:
        assert np.array_equal(capture[hook], same[hook])
    again = await client.generate("Left, too", max_tokens=5, hooks="resid_post.3")
    assert again.cached and generation.token_ids == again.token_ids and generation.text == again.text
    assert np.array_equal(generation["resid_post.3"], again["resid_post.3"])
    assert await first.status() == "finished" and await first.position() is None


async def test_through_redis(client: Client) -> None:
    """A client without the store's folder."""
    async with Client(client.url, store=False) as remote:
        job = await remote.submit_capture("Seen from a laptop", "resid_post.3")
        rows = (await remote.job(job.id).result())["resid_post.3"]
    here = await client.capture("Seen from a laptop", "resid_post.3")
    assert here.cached and np.array_equal(rows, here["resid_post.3"])


async def test_what_is_stored_is_not_queued(client: Client) -> None:
    for hook in HOOKS:
        await client.capture("Known already", hook)
    job = await client.submit_capture("Known already", HOOKS)
    assert await client._queue.redis.exists(f"rq:job:{job.id}") == 0
    assert await job.status() == "finished"
    assert (await job.result()).cached


async def test_cancel_wakes_who_awaits_and_leaves_others(client: Client) -> None:
    async def awaited(by: Client, job: Job[Any]) -> None:
        while by._queue.id.encode() not in await client._queue.redis.smembers(keys.waiters(job.id)):  # type: ignore[misc]
            await asyncio.sleep(0.01)

    async with asyncio.timeout(120):
        job = await client.submit_generate("A long story", max_tokens=100, ignore_eos=True)
        mine = asyncio.create_task(job.result())
        while await job.status() != "started":
            await asyncio.sleep(0.02)
        async with Client(client.url) as other:
            elsewhere = other.job(job.id)
            theirs = asyncio.create_task(elsewhere.result())
            await awaited(other, job)
            await job.cancel()
            with pytest.raises(JobCancelled):
                await mine
            with pytest.raises(JobCancelled):
                await job.result()
            assert await job.status() == "cancelled"
            assert len((await theirs).token_ids) == 100
        long = await client.submit_generate("Another long story", max_tokens=800, ignore_eos=True)
        while await long.status() != "started":
            await asyncio.sleep(0.02)
        elsewhere = client.job(long.id)
        waiting = asyncio.create_task(elsewhere.result())
        await awaited(client, long)
        waiting.cancel()  # who awaits the result goes, the job stays
        await asyncio.gather(waiting, return_exceptions=True)
        assert await long.status() == "started"
        await client.job(long.id).cancel()
        while await elsewhere.status() == "started":
            await asyncio.sleep(0.02)
        assert await elsewhere.status() == "cancelled"
        with pytest.raises(JobCancelled):
            await elsewhere.result()


async def test_unknown_id(client: Client) -> None:
    with pytest.raises(InvalidJob, match="knows no job") as caught:
        await client.job("0" * 40).result()
    assert caught.value.field == "id"
    with pytest.raises(InvalidJob) as caught:
        await client.submit_capture("x", "resid_post.3", priority="fast")  # type: ignore[arg-type]
    assert caught.value.field == "priority"
