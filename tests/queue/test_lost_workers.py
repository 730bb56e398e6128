"""Workers that die, stall, leave or poison; nothing is lost, and nothing is answered twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from lenspool import keys
from lenspool.errors import WorkerLost
from tests.queue.conftest import CARD, LOST_S, Connect, Pool, doc, started, until

QUEUE = keys.queue_name(CARD)


async def test_sigterm_drains(pool: Pool, connect: Connect) -> None:
    worker = pool.worker()
    async with connect() as queue:
        tickets = [queue.submit(CARD, doc(n, "sleep", s=0.5)) for n in range(20)]
        await started(tickets[-1])
        worker.signal(signal.SIGTERM)
        results = await asyncio.gather(*(ticket.result() for ticket in tickets))
        assert [result["n"] for result in results] == list(range(20))
    stats = worker.wait()
    assert (stats["committed"], stats["requeued"]) == (20, 0)
    assert not pool.redis.exists(keys.card(worker.out.name))
    assert pool.redis.zcard(keys.CARDS) == 0


async def test_sigterm_with_short_grace_puts_jobs_back_and_another_worker_takes_over(
    pool: Pool, connect: Connect
) -> None:
    first = pool.worker(grace=0.2)
    async with connect() as queue:
        tickets = [queue.submit(CARD, doc(n, "sleep", s=1.2)) for n in range(20)]
        await started(tickets[-1])
        first.signal(signal.SIGTERM)
        stats = await asyncio.to_thread(first.wait)
        assert (stats["requeued"], stats["committed"]) == (20, 0)
        assert pool.queued() == 20
        second = pool.worker()
        results = await asyncio.gather(*(ticket.result() for ticket in tickets))
        assert {result["pid"] for result in results} == {second.pid}
        assert set(pool.executions().values()) == {2}


async def test_second_sigterm_does_not_wait(pool: Pool, connect: Connect) -> None:
    worker = pool.worker(grace=60.0)
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1, "sleep", s=30.0))
        await started(ticket)
        worker.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        worker.signal(signal.SIGTERM)
        assert (await asyncio.to_thread(worker.wait))["requeued"] == 1
        assert await ticket.status() == "queued"


async def test_kill_9_with_100_jobs(pool: Pool, connect: Connect) -> None:
    first, second = pool.worker(max_in_flight=100), pool.worker(max_in_flight=1)
    async with connect() as queue:
        hold = queue.submit(CARD, doc("hold", "sleep", s=0.1))
        await hold.result()
        tickets = [queue.submit(CARD, doc(n, "sleep", s=0.5)) for n in range(100)]
        await until(lambda: pool.redis.zcard(f"rq:wip:{QUEUE}") > 90)
        first.signal(signal.SIGKILL)
        third = pool.worker()
        results = await asyncio.wait_for(asyncio.gather(*(ticket.result() for ticket in tickets)), LOST_S + 15)
        assert [result["n"] for result in results] == list(range(100))
        assert {result["pid"] for result in results} <= {first.pid, second.pid, third.pid}
        assert max(pool.executions().values()) <= 2


async def test_stopped_worker_is_fenced(pool: Pool, connect: Connect) -> None:
    first = pool.worker()
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1, "sleep", s=0.8))
        await started(ticket)
        first.signal(signal.SIGSTOP)
        second = pool.worker()
        result = await asyncio.wait_for(ticket.result(), LOST_S + 5)
        assert result["pid"] == second.pid
        first.signal(signal.SIGCONT)
        assert await queue.submit(CARD, doc(2)).result() == {"n": 2}
        await until(lambda: b"fenced" in first.out.read_bytes())
        assert pool.redis.xlen(f"rq:results:{ticket.id}") == 1  # one answer
        first.signal(signal.SIGTERM)
        assert (await asyncio.to_thread(first.wait))["fenced"] == 1
        assert pool.executions()["1"] == 2


async def test_blocked_loop_lets_its_leases_lapse(pool: Pool, connect: Connect) -> None:
    first = pool.worker(stall_limit=0.5)
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1, "sleep", s=1.0))
        await started(ticket)
        blocker = queue.submit(CARD, doc("b", "block_once", s=5.0))
        await until(lambda: pool.executions()["b"] == 1)
        second = pool.worker()
        results = await asyncio.wait_for(asyncio.gather(ticket.result(), blocker.result()), LOST_S)
        assert {result["pid"] for result in results} == {second.pid}
        await until(lambda: b"fenced" in first.out.read_bytes(), 10)
        for each in (ticket, blocker):
            assert pool.redis.xlen(f"rq:results:{each.id}") == 1


async def test_poison_job_fails_alone(pool: Pool, connect: Connect) -> None:
    """Each worker that takes it dies; all the others' jobs are answered, however often they were beside it."""
    pool.worker()
    pool.worker()

    async def supervise() -> None:
        while True:
            await asyncio.sleep(0.1)
            for worker in pool.workers:
                if not worker.process.is_alive():
                    worker.end()
                    pool.workers.remove(worker)
                    pool.worker(wait=False)

    supervisor = asyncio.create_task(supervise())
    try:
        async with connect() as queue:
            good = [queue.submit(CARD, doc(n, "sleep", s=0.5)) for n in range(30)]
            poison = queue.submit(CARD, doc("poison", "kill"))
            good += [queue.submit(CARD, doc(n, "sleep", s=0.5)) for n in range(30, 60)]
            with pytest.raises(WorkerLost) as caught:
                await poison.result()
            assert caught.value.attempts == 3 and caught.value.job_id == poison.id
            results = await asyncio.gather(*(ticket.result() for ticket in good))
            assert [result["n"] for result in results] == list(range(60))
            assert pool.executions()["poison"] == 3
    finally:
        supervisor.cancel()


async def test_clean_up_by_another_process_is_seen(pool: Pool, connect: Connect) -> None:
    """`rq info` or a dashboard may end jobs without telling anyone."""
    from rq.registry import StartedJobRegistry

    from lenspool.rq_json import JsonJob, StrictJSON

    worker = pool.worker()
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1, "sleep", s=60.0))
        await until(lambda: pool.redis.zcard(f"rq:wip:{QUEUE}") == 1)  # `started` is a moment earlier
        worker.signal(signal.SIGKILL)
        pool.redis.hset(f"rq:job:{ticket.id}", "retries_left", 0)
        registry = StartedJobRegistry(QUEUE, pool.redis, job_class=JsonJob, serializer=StrictJSON)
        registry.cleanup(timestamp=time.time() + 60)
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(ticket.result(), 10)


async def test_rq_suspend_and_resume(pool: Pool, connect: Connect) -> None:
    from rq.suspension import resume, suspend

    pool.worker()
    async with connect() as queue:
        suspend(pool.redis)
        ticket = queue.submit(CARD, doc(1))
        await asyncio.sleep(1.0)
        assert await ticket.status() == "queued"
        resume(pool.redis)
        assert await ticket.result() == {"n": 1}


# -- Redis


@pytest.mark.parametrize("keep", [True, False], ids=["append-only", "empty"])
async def test_redis_dies_and_comes_back(pool: Pool, connect: Connect, keep: bool) -> None:
    pool.worker(max_in_flight=50)
    async with connect() as queue:
        tickets = [queue.submit(CARD, doc(n, "sleep", s=0.5)) for n in range(100)]
        await started(tickets[0])
        pool.broker.kill()
        await asyncio.sleep(1.0)
        if not keep:
            for file in (pool.folder / "data").rglob("*.aof*"):
                file.unlink()
        pool.broker.start()
        assert (pool.redis.dbsize() > 50) is keep
        during = queue.submit(CARD, doc("during"))
        results = await asyncio.wait_for(asyncio.gather(*(ticket.result() for ticket in tickets)), 40)
        assert [result["n"] for result in results] == list(range(100))
        assert await during.result() == {"n": "during"}
        stop = queue.submit(CARD, doc("stop", "sleep", s=60.0))  # commands are heard again, too
        await started(stop)
        await stop.cancel()
        await until(lambda: pool.redis.hget(f"rq:job:{stop.id}", "status") == b"stopped")


async def test_redis_stands_still_beyond_the_lease(pool: Pool, connect: Connect) -> None:
    pool.worker(), pool.worker()
    async with connect() as queue:
        tickets = [queue.submit(CARD, doc(n, "sleep", s=1.0)) for n in range(50)]
        await started(tickets[0])
        os.kill(pool.broker.pid, signal.SIGSTOP)
        await asyncio.sleep(3.5)
        os.kill(pool.broker.pid, signal.SIGCONT)
        results = await asyncio.wait_for(asyncio.gather(*(ticket.result() for ticket in tickets)), 40)
        assert [result["n"] for result in results] == list(range(50))
