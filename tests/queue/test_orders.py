"""Jobs that go on without the client that sent them."""

from __future__ import annotations

import asyncio

import pytest

from lenspool import keys
from lenspool.errors import DeadlineExceeded, JobCancelled, PoolUnavailable, QueueFull
from lenspool.orders import Orders
from lenspool.submission import encode
from lenspool.terms import Terms
from tests.queue.conftest import CARD, Connect, Pool, doc, started, until

FOLLOW = Terms("batch", follow=True)


async def test_outlives_its_client_and_is_found_by_another(pool: Pool, connect: Connect) -> None:
    record = {"hooks": ["a"], "ranges": [[0, None]]}
    async with connect() as queue:
        job_id = await Orders(queue).record(doc(1), record)
        await Orders(queue).place(CARD, doc(1), Terms())
    assert job_id == encode(doc(1))[0]
    assert pool.queued() == 1
    pool.worker()
    async with connect() as other:
        orders = Orders(other)
        assert await orders.fetch(job_id) == record
        assert await orders.fetch("unknown") is None
        assert await other.submit(CARD, doc(1), FOLLOW).result() == {"n": 1}
        assert await orders.failure(job_id) is None
    assert pool.executions() == {"1": 1}
    assert not pool.redis.keys("lenspool:done:kept") and not pool.redis.exists(keys.waiters(job_id))
    assert 0 < pool.redis.ttl(keys.request(job_id)) <= keys.REQUEST_TTL


async def test_awaiters_that_leave_do_not_cancel_it(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue:
        await Orders(queue).place(CARD, doc(1, "sleep", s=1.0), Terms())
        async with connect() as other:
            ticket = other.submit(CARD, doc(1, "sleep", s=1.0), FOLLOW)
            await started(ticket)
            await ticket.cancel()
        assert (await queue.submit(CARD, doc(1, "sleep", s=1.0), FOLLOW).result())["n"] == 1
        assert pool.executions() == {"1": 1}


async def test_withdrawn_while_another_awaits_it(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue, connect() as other:
        orders = Orders(queue)
        await orders.place(CARD, doc(1, "sleep", s=1.0), Terms())
        ticket = other.submit(CARD, doc(1, "sleep", s=1.0), FOLLOW)
        await started(ticket)
        await orders.withdraw(CARD, ticket.id)
        assert (await ticket.result())["n"] == 1
        await orders.place(CARD, doc(2, "sleep", s=60.0), Terms())
        job_id, _ = encode(doc(2, "sleep", s=60.0))
        await until(lambda: pool.redis.hget(f"rq:job:{job_id}", "status") == b"started")
        await orders.withdraw(CARD, job_id)
        await until(lambda: pool.redis.hget(f"rq:job:{job_id}", "status") == b"stopped")
        assert isinstance(await orders.failure(job_id), JobCancelled)
        assert await queue.status(job_id) == "cancelled"


async def test_position_counts_down(pool: Pool, connect: Connect) -> None:
    async with connect() as queue, connect() as other:
        orders = Orders(queue)
        for n in range(5):
            await orders.place(CARD, doc(n), Terms("batch"))
        await Orders(other).place(CARD, doc("x"), Terms("batch"))
        ids = [encode(doc(n))[0] for n in range(5)]
        assert [await orders.position(job_id) for job_id in ids] == [0, 1, 2, 3, 4]
        await orders.withdraw(CARD, ids[1])
        assert [await orders.position(job_id) for job_id in ids] == [0, None, 1, 2, 3]
        # as a lost worker's jobs wait
        pool.redis.lrem(f"rq:queue:{keys.lane_name(CARD, 'batch', queue.id)}", 1, ids[2])
        pool.redis.rpush(f"rq:queue:{keys.suspects_name(CARD)}", ids[2])
        assert await orders.position(ids[2]) == 0
        assert await orders.position("unknown") is None


async def test_deadline_of_a_kept_job_is_not_moved_by_who_looks_for_it(pool: Pool, connect: Connect) -> None:
    pool.worker(max_in_flight=1)
    async with connect() as queue, connect() as other:
        busy = queue.submit(CARD, doc("busy", "sleep", s=2.5))
        await started(busy)
        await Orders(queue).place(CARD, doc("late"), Terms(queue_timeout=1.0))
        await asyncio.sleep(0.7)
        with pytest.raises(DeadlineExceeded) as caught:
            await other.submit(CARD, doc("late"), FOLLOW).result()
        assert (caught.value.stage, caught.value.seconds) == ("queue", 1.0)
        assert isinstance(await Orders(other).failure(encode(doc("late"))[0]), DeadlineExceeded)
        assert pool.executions() == {"busy": 1}


async def test_full_queue_and_dead_redis_are_told(pool: Pool, connect: Connect) -> None:
    async with connect(patience=1.0) as queue:
        pool.redis.hset(keys.limits(CARD), mapping={"client": 1, "model": 5})
        await Orders(queue).place(CARD, doc(1), Terms())
        with pytest.raises(QueueFull):
            await Orders(queue).place(CARD, doc(2), Terms())
        pool.broker.stop()
        with pytest.raises(PoolUnavailable):
            await Orders(queue).place(CARD, doc(3), Terms())
    pool.broker.start()
