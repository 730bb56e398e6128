"""Who is served when: lanes, fairness between clients, limits and deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import pytest

from lenspool import keys
from lenspool.errors import DeadlineExceeded, InvalidJob, JobCancelled, QueueFull
from lenspool.queue import JobQueue
from lenspool.terms import Priority, Terms
from lenspool.ticket import JobTicket, answer_of
from tests.queue.conftest import CARD, Connect, Pool, doc, started, until

BATCH = Terms("batch")
QUEUE = keys.queue_name(CARD)


def order(pool: Pool) -> list[str]:
    """Documents in the order in which they were run, by their `n`."""
    return [line.split()[0] for line in pool.log.read_text().splitlines()]


def flood(queue: JobQueue, name: str, count: int, terms: Terms, s: float = 0.02) -> list[JobTicket]:
    return [queue.submit(CARD, doc(f"{name}-{n}", "sleep", s=s), terms) for n in range(count)]


async def queued(pool: Pool, count: int) -> None:
    await until(lambda: pool.queued() == count, 60)


async def results(tickets: Iterable[JobTicket]) -> None:
    await asyncio.gather(*(ticket.result() for ticket in tickets))


@pytest.mark.parametrize(("lane", "count"), [("interactive", 2_000), ("batch", 20_000)])
async def test_flood_delays_a_single_job_by_one_batch_at_most(
    pool: Pool, connect: Connect, lane: Priority, count: int
) -> None:
    """Also in the very lane that is flooded."""
    places, terms = 16, Terms(lane)
    async with connect() as script, connect() as person:
        tickets = flood(script, "flood", count, terms)
        await queued(pool, count)
        pool.worker(max_in_flight=places)
        for i in range(5):
            await asyncio.sleep(0.2)
            before = len(order(pool))
            began = time.monotonic()
            assert (await person.submit(CARD, doc(f"single-{i}", "sleep", s=0.02), terms).result())["n"]
            assert time.monotonic() - began < 5.0
            assert order(pool).index(f"single-{i}") - before <= 2 * places
        for ticket in tickets:
            script.give_up(ticket)
        await until(lambda: pool.queued() == 0, 60)


async def test_two_floods_share_by_turns_and_lanes_by_weight(pool: Pool, connect: Connect) -> None:
    async with connect() as a, connect() as b, connect() as c:
        tickets = flood(a, "a", 400, Terms()) + flood(b, "b", 400, Terms()) + flood(c, "c", 400, BATCH)
        await queued(pool, 1200)
        pool.worker(max_in_flight=8)
        await until(lambda: len(order(pool)) >= 340, 30)
        first = [name[0] for name in order(pool)[:340]]
        assert abs(first.count("a") - first.count("b")) <= 2
        assert abs(first.count("c") - 20) <= 4  # one of 17: 8 turns of each of the other two for one of its own
        await results(tickets)
        assert set(pool.executions().values()) == {1}
    await until(lambda: not pool.redis.exists(keys.ring(CARD), keys.turn(CARD)))
    assert pool.redis.smembers("rq:queues") == {f"rq:queue:{QUEUE}".encode()}


async def test_idle_client_saves_up_no_turns(pool: Pool, connect: Connect) -> None:
    async with connect() as a, connect() as b:
        pool.worker(max_in_flight=4)
        await b.submit(CARD, doc("b-early")).result()
        tickets = flood(a, "a", 300, Terms())
        await until(lambda: len(order(pool)) >= 100, 30)
        before = len(order(pool))
        tickets += flood(b, "b", 100, Terms())
        await until(lambda: len(order(pool)) >= before + 80, 30)
        share = [name[0] for name in order(pool)[before + 20 : before + 80]]
        assert 20 <= share.count("a") <= 40
        await results(tickets)


async def test_batch_jobs_leave_places_for_questions(pool: Pool, connect: Connect) -> None:
    pool.worker(max_in_flight=16, reserve=2)
    async with connect() as script, connect() as person:
        flood(script, "long", 30, BATCH, s=60.0)
        await until(lambda: pool.redis.zcard(f"rq:wip:{QUEUE}") == 14)
        assert await asyncio.wait_for(person.submit(CARD, doc("question")).result(), 5) == {"n": "question"}


@pytest.mark.parametrize("same_client", [True, False])
async def test_question_promotes_a_job_of_the_batch_lane(pool: Pool, connect: Connect, same_client: bool) -> None:
    async with connect() as script, connect() as other:
        tickets = flood(script, "flood", 3000, BATCH)
        await queued(pool, 3000)
        person = script if same_client else other
        asked = person.submit(CARD, doc("flood-2900", "sleep", s=0.02))
        assert asked.id == tickets[2900].id  # the lane is no part of the content
        mine = f"rq:queue:{keys.lane_name(CARD, 'interactive', person.id)}"
        await until(lambda: pool.redis.llen(mine) == 1)
        assert pool.queued() == 3000  # moved, not doubled
        pool.worker(max_in_flight=4)
        await asked.result()
        assert order(pool).index("flood-2900") <= 4
        await tickets[2900].result()
        for ticket in tickets:
            script.give_up(ticket)
        assert pool.executions()["flood-2900"] == 1


async def test_joining_deep_in_the_queue_of_another_client(pool: Pool, connect: Connect) -> None:
    async with connect() as script, connect() as person:
        tickets = flood(script, "flood", 300, Terms())
        await queued(pool, 300)
        asked = person.submit(CARD, doc("flood-250", "sleep", s=0.02))
        await until(lambda: pool.redis.exists(f"rq:queue:{keys.lane_name(CARD, 'interactive', person.id)}") == 1)
        first = person.submit(CARD, doc("flood-0", "sleep", s=0.02))  # is first where it is
        pool.worker(max_in_flight=4)
        await asked.result()
        assert order(pool).index("flood-250") <= 5
        await results([*tickets, first])
        assert set(pool.executions().values()) == {1}


async def test_most_jobs_of_one_client_at_a_time(pool: Pool, connect: Connect) -> None:
    pool.worker(max_in_flight=20, per_client=5)
    async with connect() as a, connect() as b:
        tickets = flood(a, "a", 60, Terms(), s=0.3)
        most = 0
        while pool.redis.zcard(f"rq:finished:{QUEUE}") < 20:
            most = max(most, pool.redis.zcard(f"rq:wip:{QUEUE}"))
            await asyncio.sleep(0.01)
        assert most == 5
        began = time.monotonic()
        await b.submit(CARD, doc("b")).result()
        assert time.monotonic() - began < 0.25  # did not wait for a's
        await results(tickets)


async def test_most_jobs_of_one_client_hold_for_all_workers(pool: Pool, connect: Connect) -> None:
    """Also when one of them dies; its share is then the other's."""
    first, second = (pool.worker(max_in_flight=20, per_client=6) for _ in range(2))
    async with connect() as a, connect() as b:
        pool.redis.hset(keys.held(CARD), mapping={"gone": f'{{"{a.id}": 6}}', "garbage": "5", "more": "{"})
        for name in ("garbage", "more"):
            pool.redis.set(keys.card(name), "{}", ex=60)
        tickets = flood(a, "a", 120, Terms(), s=0.2)
        most = 0
        while pool.redis.zcard(f"rq:finished:{QUEUE}") < 60:
            most = max(most, pool.redis.zcard(f"rq:wip:{QUEUE}"))
            await asyncio.sleep(0.01)
        assert most == 6
        assert await asyncio.wait_for(b.submit(CARD, doc("b")).result(), 1.0) == {"n": "b"}
        first.signal(9)
        await results(tickets)
        pids = {line.split()[1] for line in pool.log.read_text().splitlines()}
        assert str(second.pid) in pids


# -- limits


async def test_full_queue_names_its_limit(pool: Pool, connect: Connect) -> None:
    pool.worker(max_in_flight=1, limits=[5, 8])
    async with connect() as a, connect() as b:
        busy = a.submit(CARD, doc("busy", "sleep", s=2.0))
        await started(busy)
        tickets = flood(a, "a", 5, Terms())
        await queued(pool, 5)
        with pytest.raises(QueueFull, match="at most 5 jobs may wait per client") as caught:
            await a.submit(CARD, doc("too-many")).result()
        assert (caught.value.limit, caught.value.scope, caught.value.retryable) == (5, "client", True)
        joined = b.submit(CARD, doc("a-4", "sleep", s=0.02))  # joining takes no place
        tickets += flood(b, "b", 3, BATCH)
        await queued(pool, 8)
        with pytest.raises(QueueFull, match="at most 8 jobs may wait per model") as caught:
            await b.submit(CARD, doc("too-many")).result()
        assert (caught.value.limit, caught.value.scope) == (8, "model")
        await results([busy, joined, *tickets])
        assert await a.submit(CARD, doc("too-many")).result() == {"n": "too-many"}
        assert pool.executions()["too-many"] == 1


# -- deadlines


async def test_job_that_waits_for_too_long_is_not_run(pool: Pool, connect: Connect) -> None:
    """Who waits is told in time; what nobody takes back is not run when its time has passed."""
    worker = pool.worker(max_in_flight=1)
    async with connect() as queue, connect() as other:
        busy = queue.submit(CARD, doc("busy", "sleep", s=2.5))
        await started(busy)
        began = time.monotonic()
        ticket = queue.submit(CARD, doc("late"), Terms(queue_timeout=0.5))
        with pytest.raises(DeadlineExceeded) as caught:
            await answer_of(ticket, None, 0.5)
        assert (caught.value.stage, caught.value.seconds) == ("queue", 0.5)
        assert time.monotonic() - began < 1.5
        forgotten = queue.submit(CARD, doc("forgotten"), Terms(queue_timeout=0.5))
        kept = other.submit(CARD, doc("shared"), Terms(queue_timeout=0.5))
        patient = queue.submit(CARD, doc("shared"), Terms(queue_timeout=30.0))  # its longer limit holds
        with pytest.raises(DeadlineExceeded) as caught:
            await forgotten.result()
        assert (caught.value.stage, caught.value.seconds) == ("queue", 0.5)
        await results([busy, kept, patient])
        assert pool.executions() == {"busy": 1, "shared": 1}
    worker.signal(15)
    worker.wait()


async def test_limits_of_queue_and_run_are_separate(pool: Pool, connect: Connect) -> None:
    pool.worker(max_in_flight=1)
    async with connect() as queue:
        busy = queue.submit(CARD, doc("busy", "sleep", s=2.0))
        await started(busy)
        ticket = queue.submit(CARD, doc("slow", "sleep", s=60.0), Terms(queue_timeout=20.0, run_timeout=1.0))
        with pytest.raises(DeadlineExceeded) as caught:  # it waited for longer than it may run
            await answer_of(ticket, None, 20.0)
        assert (caught.value.stage, caught.value.seconds) == ("run", 1.0)
        run = queue.submit(CARD, doc("runs", "sleep", s=1.5), Terms(queue_timeout=1.0))
        assert (await answer_of(run, None, 1.0))["n"] == "runs"  # it ran for longer than it may wait
        with pytest.raises(DeadlineExceeded) as caught:
            await answer_of(queue.submit(CARD, doc("both", "sleep", s=60.0)), 1.0, None)
        assert caught.value.stage == "run"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Terms("fast"), "priority"),  # type: ignore[arg-type]
        (lambda: Terms(queue_timeout=0), "queue_timeout"),
        (lambda: Terms(run_timeout=float("nan")), "run_timeout"),
    ],
)
def test_wrong_terms_are_refused(make: Callable[[], Terms], field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        make()
    assert caught.value.field == field and caught.value.allowed


# -- what others may leave there


async def test_garbage_in_the_ring_is_dropped(pool: Pool, connect: Connect) -> None:
    pool.redis.set("rq:queue:x:batch:astring", 1)
    garbage = {"rq:queue:x:batch:astring": -5, "nothing": -4, b"\xff": -3, "rq:queue:x:unknown:y": -2}
    pool.redis.zadd(keys.ring(CARD), garbage)
    pool.worker()
    async with connect() as queue:
        assert await asyncio.wait_for(queue.submit(CARD, doc(1)).result(), 10) == {"n": 1}


async def test_cancelled_queue_leaves_nothing(pool: Pool, connect: Connect) -> None:
    async with connect() as queue:
        tickets = flood(queue, "a", 50, BATCH)
        await queued(pool, 50)
        await asyncio.gather(*(ticket.cancel() for ticket in tickets))
        with pytest.raises(JobCancelled):
            await tickets[0].result()
    assert pool.queued() == 0
    assert not pool.redis.exists(keys.ring(CARD), "rq:queues")
