"""What the worker's scripts write is what rq's own worker writes; and they may be repeated after a lost reply."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.exceptions
from rq import Queue, SimpleWorker, get_current_job
from rq.timeouts import TimerDeathPenalty

from lenspool import keys
from lenspool.broker import Broker
from lenspool.rq_json import FAILURE_TTL, JOB_FUNCTION, RESULT_TTL, RUN_TIMEOUT, StrictJSON
from lenspool_worker.pool_worker import PoolWorker
from tests.queue.conftest import CARD, Connect, Pool, doc, until

QUEUE = keys.queue_name(CARD)
LEASE = 30

Shape = dict[str, dict[str, Any]]

_OWN = {"lane", "client", "place"}
"""Fields of a job's hash that are lenspool's own."""


class StockWorker(SimpleWorker):
    """rq's own, with the lease of the other, in a thread."""

    death_penalty_class = TimerDeathPenalty

    def _install_signal_handlers(self) -> None:
        pass

    def get_heartbeat_ttl(self, job: Any) -> int:
        return LEASE


_seen: list[Shape] = []


def look() -> dict[str, int]:
    """A job for rq's own worker: looks at itself while it runs."""
    job = get_current_job()
    assert job is not None
    _seen.append(shape(job.connection, job.id))
    return {"n": 1}


def shape(connection: redis.Redis, job_id: str) -> Shape:
    """What there is of a job and its worker in Redis: names, kinds of values, times relative to now."""
    (worker,) = [raw.decode().removeprefix("rq:worker:") for raw in connection.smembers("rq:workers")]
    runs = [raw.decode().split(":")[-1] for raw in connection.keys(f"rq:execution:{job_id}:*")]
    runs += [e[b"execution_id"].decode() for _, e in connection.xrange(f"rq:results:{job_id}") if b"execution_id" in e]
    names = {job_id: "JOB", worker: "WORKER"} | dict.fromkeys(runs, "RUN")

    def plain(raw: bytes) -> str:
        text = raw.decode(errors="replace")
        for old, new in names.items():
            text = text.replace(old, new)
        return re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", re.sub(r"\b\d+\.\d{3,}(e-\d+)?\b", "SECONDS", text))

    now, out = time.time(), {}
    for raw in connection.keys("rq:*"):
        key, kind = raw.decode(), connection.type(raw)
        if kind == b"hash":
            value: Any = {plain(f): plain(v) for f, v in connection.hgetall(key).items() if v}
        elif kind == b"zset":
            value = {plain(m): round((score - now) / 5) for m, score in connection.zrange(key, 0, -1, withscores=True)}
        elif kind == b"stream":
            value = [{plain(f): plain(v) for f, v in entry.items()} for _, entry in connection.xrange(key)]
        else:
            value = sorted(plain(m) for m in connection.smembers(key)) if kind == b"set" else kind
        ttl = connection.ttl(key)
        out[plain(raw)] = {"value": value, "ttl": round(ttl / 5) if ttl > 0 else ttl}
    return {name: out[name] for name in sorted(out) if any(part in name for part in ("JOB", "wip", "finished", "RUN"))}


def by_rq() -> tuple[Shape, Shape]:
    """A job in rq's own hands: while it runs, and when it has succeeded."""
    with Broker() as broker:
        connection = redis.Redis.from_url(broker.url)
        queue = Queue(QUEUE, connection=connection, serializer=StrictJSON)
        job = queue.enqueue(
            look,
            job_timeout=RUN_TIMEOUT,
            result_ttl=RESULT_TTL,
            failure_ttl=FAILURE_TTL,
            description=JOB_FUNCTION,
        )
        StockWorker([queue], connection=connection, serializer=StrictJSON).work(burst=True, logging_level="ERROR")
        # the worker has left
        connection.sadd("rq:workers", f"rq:worker:{job.latest_result().worker_name}")
        return _seen.pop(), shape(connection, job.id)


async def by_us(pool: Pool, connect: Connect) -> tuple[Shape, Shape]:
    """The same of a job of the pool."""
    running: list[Shape] = []

    async def handler(document: dict[str, Any], job_id: str) -> dict[str, Any]:
        running.append(shape(pool.redis, job_id))
        return {"n": 1}

    worker = PoolWorker({"id": CARD}, handler, connection=redis.Redis.from_url(pool.url), lease=LEASE, beat=20.0)
    serving = asyncio.create_task(worker.serve())
    async with asyncio.timeout(60), connect() as queue:
        ticket = queue.submit(CARD, doc(1))
        await ticket.result()
        ended = shape(pool.redis, ticket.id)
        worker.stop()
        await serving
    return running[0], ended


async def test_keys_are_those_of_rqs_own_worker(pool: Pool, connect: Connect) -> None:
    theirs, ours = await asyncio.to_thread(by_rq), await by_us(pool, connect)
    for stage, their_shape, our_shape in zip(("running", "finished"), theirs, ours, strict=True):
        job, their_job = our_shape["rq:job:JOB"]["value"], their_shape["rq:job:JOB"]["value"]
        assert job.keys() >= _OWN
        for name in _OWN:
            del job[name]
        for fields in (job, their_job):
            del fields["data"]
        for name in ("retries_left", "retry_intervals", "enqueue_at_front_on_retry"):  # of a job with attempts
            del job[name]
        assert our_shape == their_shape, stage


def lose_one_answer(script: Callable[..., Any]) -> Callable[..., Any]:
    """The script, which runs, and whose first answer does not arrive."""
    lost = []

    def call(**arguments: Any) -> Any:
        answer = script(**arguments)
        if not lost:
            lost.append(answer)
            raise redis.exceptions.ConnectionError("the answer was lost")
        return answer

    return call


@pytest.mark.parametrize("last_attempt", [False, True])
async def test_a_claim_whose_answer_is_lost(pool: Pool, connect: Connect, last_attempt: bool) -> None:
    ran = []

    async def handler(document: dict[str, Any], job_id: str) -> dict[str, Any]:
        ran.append(document["n"])
        return {"n": document["n"]}

    worker = PoolWorker({"id": CARD}, handler, connection=redis.Redis.from_url(pool.url), lease=LEASE)
    async with asyncio.timeout(LEASE - 10), connect() as queue:
        tickets = [queue.submit(CARD, doc(n)) for n in range(5)]
        await until(lambda: pool.queued() == 5)
        if last_attempt:  # it is set aside, and taken while nothing else runs
            (place,) = pool.redis.smembers("rq:queues")
            pool.redis.lrem(place, 1, tickets[0].id)
            pool.redis.rpush(f"rq:queue:{keys.alone_name(CARD)}", tickets[0].id)
            pool.redis.hset(f"rq:job:{tickets[0].id}", "retries_left", 0)
        worker._ledger._claim = lose_one_answer(worker._ledger._claim)  # type: ignore[assignment]
        serving = asyncio.create_task(worker.serve())
        assert [(await ticket.result())["n"] for ticket in tickets] == list(range(5))
        worker.stop()
        await serving
    assert sorted(ran) == list(range(5))
    assert worker.counters["claimed"] == 5 and worker.counters["fenced"] == 0
    assert not pool.redis.exists(f"rq:wip:{QUEUE}") and not pool.redis.keys("rq:execution*")


async def test_a_commit_whose_answer_is_lost(pool: Pool, connect: Connect) -> None:
    async def handler(document: dict[str, Any], job_id: str) -> dict[str, Any]:
        return {"n": document["n"]}

    worker = PoolWorker({"id": CARD}, handler, connection=redis.Redis.from_url(pool.url), lease=LEASE)
    worker._ledger._commit = lose_one_answer(worker._ledger._commit)  # type: ignore[assignment]
    serving = asyncio.create_task(worker.serve())
    async with asyncio.timeout(LEASE - 10), connect() as queue:
        ticket = queue.submit(CARD, doc(1))
        assert await ticket.result() == {"n": 1}
        worker.stop()
        await serving
    assert pool.redis.xlen(f"rq:results:{ticket.id}") == 1
    assert worker.counters["committed"] == 1 and worker.counters["fenced"] == 0
