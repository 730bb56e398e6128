"""What operators see: jobs by lane and age, failures by type."""

from __future__ import annotations

import asyncio

import pytest

from lenspool import keys
from lenspool.cli.tables import status_tables
from lenspool.counts import job_counts
from lenspool.errors import LenspoolError
from lenspool.terms import Terms
from tests.queue.conftest import CARD, Connect, Pool, doc, until


async def test_jobs_by_lane_and_age(pool: Pool, connect: Connect) -> None:
    async with connect() as one, connect() as two:
        for n in range(3):
            one.submit(CARD, doc(n))
        two.submit(CARD, doc("b"), Terms("batch"))
        await until(lambda: pool.queued() == 4)
        await asyncio.sleep(1.2)
        two.submit(CARD, doc("late"))
        returned = one.submit(CARD, doc("returned"))
        await until(lambda: pool.queued() == 6)
        pool.redis.lrem(f"rq:queue:{keys.lane_name(CARD, 'interactive', one.id)}", 1, returned.id)
        pool.redis.rpush(f"rq:queue:{keys.queue_name(CARD)}", returned.id)
        counts = await job_counts(one.redis, CARD)
        assert (counts["queued"], counts["running"]) == (6, 0)
        lanes = counts["lanes"]
        assert {lane: n["queued"] for lane, n in lanes.items()} == {"interactive": 4, "batch": 1, "returned": 1}
        assert 1.2 <= lanes["interactive"]["oldest"] < 5 and 1.2 <= lanes["batch"]["oldest"] < 5
        assert lanes["returned"]["oldest"] < 1.2
        assert len(status_tables([{"model": CARD, "workers": [{"name": "w"}], **counts}]).renderables) == 2
        pool.worker()
        await until(lambda: pool.queued() == 0)
        counts = await job_counts(one.redis, CARD)
        assert all(lane == {"queued": 0, "oldest": 0.0} for lane in counts["lanes"].values())


async def test_failures_by_type(pool: Pool, connect: Connect) -> None:
    worker = pool.worker()
    async with connect() as queue:
        for do, times in (("fail", 2), ("crash", 1), ("too_large", 1)):
            for _ in range(times):
                with pytest.raises(LenspoolError):
                    await queue.submit(CARD, doc(do, do), fresh=True).result()
    worker.signal(15)
    assert worker.wait()["failures"] == {"InvalidJob": 2, "LenspoolError": 1, "EngineFailed": 1}
