"""Storms: many things go wrong at once, or for longer than every time-out. Nothing is lost, wrong, or waits forever."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
import zlib
from typing import Any

import pytest

from lenspool import keys
from lenspool.errors import JobCancelled, PoolUnavailable
from lenspool.orders import Orders
from lenspool.rq_json import JOB_FUNCTION, JsonQueue
from lenspool.terms import Terms
from tests.queue.conftest import CARD, LOST_S, Connect, Pool, doc, started, until

QUEUE = keys.queue_name(CARD)
FOLLOW = Terms("batch", follow=True)
"""How the handle of a submitted job waits for it."""


async def test_redis_is_silent_beyond_every_time_out(pool: Pool, connect: Connect) -> None:
    """Leases, commands, subscriptions and blocking reads all run out; then it goes on where it stood."""
    pool.worker(), pool.worker()
    async with connect() as queue, connect(patience=3.0) as impatient:
        tickets = [queue.submit(CARD, doc(n, "sleep", s=1.0)) for n in range(50)]
        doomed = queue.submit(CARD, doc("doomed", "sleep", s=60.0))
        await started(doomed)
        os.kill(pool.broker.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            during = queue.submit(CARD, doc("during"))
            with pytest.raises(PoolUnavailable, match="no answer from Redis"):
                await asyncio.wait_for(impatient.submit(CARD, doc("refused")).result(), 12)
            cancelling = asyncio.create_task(doomed.cancel())
            await asyncio.sleep(began + 16.0 - time.monotonic())
        finally:
            os.kill(pool.broker.pid, signal.SIGCONT)
        results = await asyncio.wait_for(asyncio.gather(*(ticket.result() for ticket in tickets)), 30)
        assert [result["n"] for result in results] == list(range(50))
        assert await asyncio.wait_for(during.result(), 10) == {"n": "during"}
        await cancelling
        with pytest.raises(JobCancelled):
            await doomed.result()
        await until(lambda: pool.redis.zcard(f"rq:wip:{QUEUE}") == 0)
        assert pool.executions()["during"] == 1
        for ticket in tickets:
            assert pool.redis.xlen(f"rq:results:{ticket.id}") == 1


def malformed(rng: random.Random, good: dict[str, Any]) -> dict[str, Any]:
    """A job's hash that is wrong in some way."""
    text = good["data"]
    function, _, (document,), _ = json.loads(text)
    changes: list[dict[str, Any]] = [
        {"data": text[: rng.randrange(len(text))]},
        {"data": b"\x00" + rng.randbytes(rng.randrange(1, 200))},
        {"data": zlib.compress(rng.randbytes(100))},
        {"data": zlib.compress(text)[:-8]},
        {"data": json.dumps(["os.system", None, ["true"], {}])},
        {"data": json.dumps([function, "os", [document], {}])},
        {"data": json.dumps([function, None, [document], {"more": rng.random()}])},
        {"data": json.dumps([function, None, rng.choice([[], {}, "x", 7, None, [document] * 2, [[document]]]), {}])},
        {"data": json.dumps([function, None, [{"n": float("nan")}], {}])},
        {"data": json.dumps(rng.choice([None, 5, {}, [], [[]] * 4, [1] * 9]))},
        {rng.choice(["created_at", "enqueued_at", "last_heartbeat"]): rng.randbytes(20)},
        {rng.choice(["timeout", "retries_left", "number_of_retries"]): rng.choice(["soon", "[]", b"\xff", "1e999"])},
        {rng.choice(["success_callback_name", "failure_callback_name", "stopped_callback_name"]): "os.getcwd"},
        {"origin": rng.choice(["default", b"\xff\xfe", QUEUE + "x"])},
        {f"field{i}": "x" for i in range(200)},
    ]
    return good | rng.choice(changes)


async def test_500_malformed_envelopes_at_once(pool: Pool, connect: Connect) -> None:
    """Written straight into Redis, in every queue that a worker takes from, between good jobs."""
    rng = random.Random(5)
    job = JsonQueue(QUEUE, connection=pool.redis).create_job(JOB_FUNCTION, args=(doc("bad"),), timeout=60)
    good = job.to_dict() | {"status": "queued", "data": job.data}
    lane = f"rq:queue:{keys.lane_name(CARD, 'interactive', 'stranger')}"
    places = [f"rq:queue:{name}" for name in (QUEUE, keys.suspects_name(CARD), keys.alone_name(CARD))] + [lane] * 3
    async with connect() as queue:
        tickets = [queue.submit(CARD, doc(n)) for n in range(200)]
        await until(lambda: pool.queued() == 200)
        with pool.redis.pipeline() as pipeline:
            for i in range(500):
                pipeline.hset(f"rq:job:bad-{i}", mapping=malformed(rng, good))
                pipeline.rpush(rng.choice(places), f"bad-{i}")
            for i in range(50):  # no jobs at all, or no hashes
                pipeline.set(f"rq:job:string-{i}", "x")
                pipeline.rpush(rng.choice(places), f"string-{i}", rng.randbytes(30), f"missing-{i}")
            pipeline.zadd(keys.ring(CARD), {lane: 0} | {rng.randbytes(20): rng.random() for _ in range(50)})
            pipeline.sadd("rq:queues", *places)
            pipeline.execute()
        worker = pool.worker()
        results = await asyncio.wait_for(asyncio.gather(*(ticket.result() for ticket in tickets)), 30)
        assert [result["n"] for result in results] == list(range(200))
        await until(lambda: pool.queued() == 0, 20)
        assert await asyncio.wait_for(queue.submit(CARD, doc("after")).result(), 10) == {"n": "after"}
    states = [pool.redis.hget(f"rq:job:bad-{i}", "status") for i in range(500)]
    assert states == [b"failed"] * 500
    assert all(0 < pool.redis.ttl(f"rq:job:bad-{i}") <= 3600 for i in range(500))
    assert "bad" not in pool.executions() and set(pool.executions().values()) == {1}
    assert pool.redis.exists(f"rq:wip:{QUEUE}", f"rq:queue:{QUEUE}", keys.ring(CARD)) == 0
    worker.signal(signal.SIGTERM)
    stats = await asyncio.to_thread(worker.wait)
    assert (stats["failed"], stats["committed"]) == (500, 201)


async def test_crowd_of_a_stopped_worker_runs_twice_and_is_answered_once(pool: Pool, connect: Connect) -> None:
    """It is continued while the other worker runs the same jobs: its own ends are fenced off."""
    first = pool.worker()
    async with connect() as queue:
        tickets = [queue.submit(CARD, doc(n, "sleep", s=1.5)) for n in range(40)]
        await until(lambda: len(pool.executions()) == 40)
        first.signal(signal.SIGSTOP)
        second = pool.worker()
        await until(lambda: sum(pool.executions().values()) == 80, LOST_S + 5)
        first.signal(signal.SIGCONT)
        results = await asyncio.wait_for(asyncio.gather(*(ticket.result() for ticket in tickets)), 20)
        assert [result["n"] for result in results] == list(range(40))
        assert {result["pid"] for result in results} == {second.pid}
        await until(lambda: b"fenced" in first.out.read_bytes())
        for ticket in tickets:
            assert pool.redis.xlen(f"rq:results:{ticket.id}") == 1
            assert pool.redis.hget(f"rq:job:{ticket.id}", "status") == b"finished"
        both = [queue.submit(CARD, doc(f"more-{n}", "sleep", s=0.1)) for n in range(40)]
        await asyncio.gather(*(ticket.result() for ticket in both))
    for worker, fenced in ((first, 40), (second, 0)):
        worker.signal(signal.SIGTERM)
        assert (await asyncio.to_thread(worker.wait))["fenced"] == fenced
    assert pool.redis.zcard(f"rq:wip:{QUEUE}") == 0


@pytest.mark.parametrize("awaited", [True, False])
async def test_redis_comes_back_empty_while_a_kept_job_waits(pool: Pool, connect: Connect, awaited: bool) -> None:
    """Who waits sends it again; who comes later learns that it is gone, and may."""
    async with connect() as queue, connect(patience=2.0) as impatient:
        orders = Orders(queue)
        job_id = await orders.record(doc("kept"), {"model": CARD})
        await orders.place(CARD, doc("kept"), Terms("batch"))
        tickets = [queue.submit(CARD, doc("kept"), FOLLOW)] if awaited else []
        waiters = keys.waiters(job_id)
        await until(lambda: pool.redis.scard(waiters) == 1 + awaited)
        pool.broker.kill()
        for file in (pool.folder / "data").rglob("*.aof*"):
            file.unlink()
        pool.broker.start()
        assert await orders.fetch(job_id) is None
        if not awaited:
            assert (await queue.status(job_id), await orders.failure(job_id)) == ("unknown", None)
            with pytest.raises(PoolUnavailable, match="no worker serves"):
                await asyncio.wait_for(impatient.submit(CARD, doc("kept"), FOLLOW).result(), 10)
            tickets = [queue.submit(CARD, doc("kept"), FOLLOW)]
        pool.worker()
        assert await asyncio.wait_for(tickets[0].result(), 15) == {"n": "kept"}
        assert pool.executions() == {"kept": 1}


async def test_1000_cancellations_at_random_times_leave_nothing(pool: Pool, connect: Connect) -> None:
    rng = random.Random(6)
    worker = pool.worker(max_in_flight=40)

    def lasting() -> set[bytes]:
        return {key for key in pool.redis.keys("*") if pool.redis.ttl(key) == -1}

    async with connect() as queue:
        await queue.submit(CARD, doc("first")).result()
        before = lasting()

        async def ask(n: int) -> None:
            await asyncio.sleep(rng.random() * 2)
            run = asyncio.create_task(queue.submit(CARD, doc(n, "sleep", s=rng.random() * 0.2)).result())
            await asyncio.wait([run], timeout=rng.random() * rng.choice([0.01, 0.3, 2.0]))
            run.cancel()
            (end,) = await asyncio.gather(run, return_exceptions=True)
            assert end == {"n": n, "pid": worker.pid} or isinstance(end, asyncio.CancelledError), end
            ends.append(type(end))

        ends: list[type] = []
        await asyncio.wait_for(asyncio.gather(*(ask(n) for n in range(1000))), 60)
        assert min(ends.count(dict), ends.count(asyncio.CancelledError)) > 50
        assert not queue.flights
        assert await queue.submit(CARD, doc("last")).result() == {"n": "last"}
        wip = f"rq:wip:{QUEUE}"
        await until(lambda: pool.redis.zcard(wip) == 0)
        assert pool.queued() == 0
        passing = {b"rq:canceled:" + QUEUE.encode(), b"rq:failed:" + QUEUE.encode()}
        assert lasting() - passing == before
        left = [wip, f"rq:queue:{QUEUE}", keys.ring(CARD), keys.turn(CARD)]
        left += [f"rq:worker:{name.decode()}:executions" for name in pool.redis.zrange(keys.CARDS, 0, -1)]
        left += [key for kind in ("rq:execution*", "lenspool:waiters:*") for key in pool.redis.keys(kind)]
        assert pool.redis.exists(*left) == 0
    worker.signal(signal.SIGTERM)
    stats = await asyncio.to_thread(worker.wait)
    assert (stats["in_flight"], stats["failed"], stats["requeued"]) == (0, 0, 0)
