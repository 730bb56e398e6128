from __future__ import annotations

import asyncio

import pytest

from lenspool import keys
from lenspool.errors import DeadlineExceeded, EngineFailed, InvalidJob, JobCancelled, LenspoolError, PoolUnavailable
from lenspool.queue import JobQueue
from lenspool.terms import Terms
from tests.queue.conftest import CARD, Connect, Pool, doc, started, until


async def test_result_comes_back(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1))
        assert await ticket.result() == {"n": 1}
        assert await ticket.status() == "finished"
        assert len(ticket.id) == 40


async def test_equal_documents_of_50_clients_run_once(pool: Pool, connect: Connect) -> None:
    pool.worker()
    queues = [JobQueue(pool.url) for _ in range(50)]
    await asyncio.gather(*(queue.open() for queue in queues))
    try:
        tickets = [queue.submit(CARD, doc("same", "sleep", s=0.5)) for queue in queues for _ in range(2)]
        results = await asyncio.gather(*(ticket.result() for ticket in tickets))
        assert all(result == results[0] for result in results)
        late = queues[0].submit(CARD, doc("same", "sleep", s=0.5))
        assert await late.result() == results[0]
        assert pool.executions() == {"same": 1}
    finally:
        await asyncio.gather(*(queue.close() for queue in queues))


async def test_key_order_does_not_matter_and_fresh_runs_again(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue, connect() as other:
        await queue.submit(CARD, {"n": 1, "do": "echo"}).result()
        await other.submit(CARD, {"do": "echo", "n": 1}).result()
        assert pool.executions() == {"1": 1}
        await asyncio.gather(*(q.submit(CARD, doc(1), fresh=True).result() for q in (queue, queue, other)))
        assert pool.executions()["1"] in (2, 3)  # `other` may have asked just after the second run ended


async def test_5000_awaits_use_few_connections(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue:
        tickets = [queue.submit(CARD, doc(n)) for n in range(5000)]
        waiting = asyncio.gather(*(ticket.result() for ticket in tickets))
        most = 0
        while not waiting.done():
            most = max(most, (await queue.redis.info("clients"))["connected_clients"])
            await asyncio.sleep(0.1)
        assert [result["n"] for result in await waiting] == list(range(5000))
        assert most < 40


async def test_bounded_pool_makes_small_reads_wait_instead_of_failing(pool: Pool, connect: Connect) -> None:
    async with connect() as queue:
        await queue.redis.set("x", 1)
        assert await asyncio.gather(*(queue.redis.get("x") for _ in range(1000))) == [b"1"] * 1000


async def test_failure_is_typed_told_to_all_and_blocks_nobody(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as one, connect() as two:
        tickets = [queue.submit(CARD, doc(1, "fail")) for queue in (one, one, two)]
        errors = await asyncio.gather(*(ticket.result() for ticket in tickets), return_exceptions=True)
        for ticket, error in zip(tickets, errors, strict=True):
            assert type(error) is InvalidJob
            assert (error.field, error.reason, error.allowed) == ("positions", "out of range", "0 to 7")
            assert error.job_id == ticket.id
        assert errors[0] is not errors[1]
        assert await tickets[0].status() == "failed"
        assert pool.executions() == {"1": 1}
        with pytest.raises(InvalidJob):
            await two.submit(CARD, doc(1, "fail")).result()
        assert pool.executions() == {"1": 2}


@pytest.mark.parametrize(
    ("do", "kind", "words"),
    [
        ("crash", LenspoolError, "ZeroDivisionError: division by zero"),
        ("cancel_itself", EngineFailed, "the run was cancelled"),
        ("too_large", EngineFailed, "not a small JSON object"),
        ("odd_error", EngineFailed, "a field that is not JSON"),
        ("long_error", EngineFailed, "xxx"),
        ("engine_died", LenspoolError, "the engine is gone"),
    ],
)
async def test_broken_handlers_fail_their_job_only(
    shared_pool: Pool, do: str, kind: type[LenspoolError], words: str
) -> None:
    queue = JobQueue(shared_pool.url)
    await queue.open()
    try:
        neighbour = queue.submit(CARD, doc(f"beside-{do}", "sleep", s=0.3))
        with pytest.raises(kind, match=words):
            await queue.submit(CARD, doc(do, do)).result()
        assert (await neighbour.result())["n"] == f"beside-{do}"
        assert shared_pool.executions()[do] == (3 if do == "engine_died" else 1)
    finally:
        await queue.close()


async def test_timed_out_run_is_a_deadline(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue, connect() as patient:
        neighbour = queue.submit(CARD, doc("good", "sleep", s=1.5))
        bad = queue.submit(CARD, doc("slow", "sleep", s=1.5), Terms(run_timeout=1.0))
        await started(bad)
        good = patient.submit(CARD, doc("slow", "sleep", s=1.5), Terms(run_timeout=60.0))
        with pytest.raises(DeadlineExceeded) as caught:
            await bad.result()
        assert (caught.value.stage, caught.value.seconds, caught.value.job_id) == ("run", 1.0, bad.id)
        assert (await neighbour.result())["n"] == "good"
        assert (await good.result())["n"] == "slow"  # its own limit holds, not the one of who came first


async def test_document_is_checked_before_it_is_sent(pool: Pool, connect: Connect) -> None:
    async with connect() as queue:
        for bad in ({"x": float("nan")}, {"x": object()}, {"x": "y" * 8_000_001}):
            with pytest.raises(InvalidJob):
                queue.submit(CARD, bad)
        assert await queue.redis.dbsize() == 0


# -- cancelling


async def test_cancel_queued(pool: Pool, connect: Connect) -> None:
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1))
        await until(lambda: pool.redis.exists(f"rq:job:{ticket.id}") == 1)
        assert await ticket.status() == "queued"
        waiting = asyncio.create_task(ticket.result())
        await asyncio.sleep(0)
        await ticket.cancel()
        with pytest.raises(JobCancelled):
            await waiting
        assert await ticket.status() == "cancelled"
        assert pool.queued() == 0
        again = queue.submit(CARD, doc(1))
        pool.worker()
        assert await again.result() == {"n": 1}
        assert pool.executions() == {"1": 1}


async def test_cancel_running_stops_it_and_an_equal_job_runs_anew(pool: Pool, connect: Connect) -> None:
    worker = pool.worker()
    async with connect() as queue, connect() as other:
        ticket = queue.submit(CARD, doc(1, "sleep", s=1.0))
        await started(ticket)
        await ticket.cancel()
        again = other.submit(CARD, doc(1, "sleep", s=1.0))  # while the first run is being stopped
        with pytest.raises(JobCancelled):
            await ticket.result()
        assert (await again.result())["n"] == 1
        long = queue.submit(CARD, doc(2, "sleep", s=60.0))
        await started(long)
        await long.cancel()
        await until(lambda: pool.redis.hget(f"rq:job:{long.id}", "status") == b"stopped")
    worker.signal(15)
    assert worker.wait()["in_flight"] == 0


async def test_one_of_two_waiters_does_not_stop_the_other(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as one, connect() as two:
        a, b, c = (queue.submit(CARD, doc(1, "sleep", s=1.0)) for queue in (one, one, two))
        await started(a)
        await started(c)
        await a.cancel()
        task = asyncio.create_task(b.result())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await c.result())["n"] == 1
        assert pool.executions() == {"1": 1}


async def test_cancelled_task_cancels_the_job_when_it_was_the_last(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1, "sleep", s=60.0))
        first, second = (asyncio.create_task(ticket.result()) for _ in range(2))
        await started(ticket)
        first.cancel()
        await asyncio.sleep(0.3)
        assert pool.redis.hget(f"rq:job:{ticket.id}", "status") == b"started"
        second.cancel()
        await until(lambda: pool.redis.hget(f"rq:job:{ticket.id}", "status") == b"stopped")
        assert await ticket.status() == "cancelled"


async def test_stop_command_of_rq_is_told_as_cancelled(pool: Pool, connect: Connect) -> None:
    from rq.command import send_stop_job_command

    from lenspool.rq_json import StrictJSON

    pool.worker()
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1, "sleep", s=60.0))
        await started(ticket)
        await asyncio.to_thread(send_stop_job_command, pool.redis, ticket.id, StrictJSON)
        with pytest.raises(JobCancelled):
            await ticket.result()


async def test_closing_a_client_gives_its_jobs_up(pool: Pool, connect: Connect) -> None:
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1))
        await until(lambda: pool.redis.exists(f"rq:job:{ticket.id}") == 1)
    with pytest.raises(JobCancelled):
        await ticket.result()
    assert pool.redis.hget(f"rq:job:{ticket.id}", "status") == b"canceled"


# -- nobody waits forever


async def test_no_worker_is_unavailable_after_patience(pool: Pool, connect: Connect) -> None:
    async with connect(patience=1.0) as queue:
        ticket = queue.submit(CARD, doc(1))
        with pytest.raises(PoolUnavailable, match="no worker serves"):
            await ticket.result()
        await until(lambda: pool.queued() == 0)
    pool.worker()
    async with connect(patience=1.0) as queue:
        slow = queue.submit(CARD, doc(2, "sleep", s=2.0))  # longer than patience, but served
        other = queue.submit("other@card", doc(3))
        with pytest.raises(PoolUnavailable):
            await other.result()
        assert (await slow.result())["n"] == 2


async def test_unreachable_redis_is_unavailable(pool: Pool, connect: Connect) -> None:
    async with connect(patience=0.5) as queue:
        pool.broker.stop()
        with pytest.raises(PoolUnavailable, match="no answer from Redis"):
            await queue.submit(CARD, doc(1)).result()
    nowhere = JobQueue("unix:///nowhere/redis.sock", patience=0.3)
    with pytest.raises(PoolUnavailable):
        await nowhere.open()
    pool.broker.start()


# -- what is left behind


async def test_everything_left_expires(pool: Pool, connect: Connect) -> None:
    worker = pool.worker()
    async with connect() as queue:
        await asyncio.gather(*(queue.submit(CARD, doc(n)).result() for n in range(200)))
        lost = [queue.submit(CARD, doc(n, "fail")) for n in range(5)]
        await asyncio.gather(*(ticket.result() for ticket in lost), return_exceptions=True)
        running = queue.submit(CARD, doc("r", "sleep", s=60.0))
        await started(running)
        await running.cancel()
    worker.signal(15)
    worker.wait()
    registries = {b"rq:finished", b"rq:failed", b"rq:canceled", b"rq:queues", b"rq:workers"}
    for key in pool.redis.keys("*"):
        if pool.redis.ttl(key) == -1:
            assert b":".join(key.split(b":")[:2]) in registries, key
    for name in ("finished", "failed"):  # members of the registries are dropped by their score
        scores = [score for _, score in pool.redis.zrange(f"rq:{name}:{keys.queue_name(CARD)}", 0, -1, withscores=True)]
        assert scores and max(scores) < float("inf")
    assert not pool.redis.keys("lenspool:done:*") and not pool.redis.keys("lenspool:waiters:*")
    assert not pool.redis.keys("lenspool:card*")
