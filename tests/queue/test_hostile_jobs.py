"""What someone with write access to Redis may leave there: nothing of it runs, and nothing of it stops a worker."""

from __future__ import annotations

import asyncio
import http.server
import json
import pickle
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rq import Callback, Queue, Repeat, Retry
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer, PickleSerializer
from rq.webhook import Webhook

from lenspool import keys
from lenspool.errors import InvalidJob, from_wire
from lenspool.rq_json import JOB_FUNCTION, MAX_DOCUMENT_BYTES, JsonJob, JsonQueue, StrictJSON
from tests.queue.conftest import CARD, Connect, Pool, doc, until

QUEUE = keys.queue_name(CARD)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (str(self._marker),)


def queue(pool: Pool, serializer: Any = JSONSerializer) -> Queue:
    return Queue(QUEUE, connection=pool.redis, serializer=serializer)


def raw(pool: Pool, job_id: str, data: bytes, **fields: Any) -> str:
    """Enqueue a hash written by hand."""
    pool.redis.hset(f"rq:job:{job_id}", mapping={"status": "queued", "origin": QUEUE, "data": data} | fields)
    pool.redis.rpush(f"rq:queue:{QUEUE}", job_id)
    return job_id


def payload(function: Any = JOB_FUNCTION, instance: Any = None, args: Any = None, kwargs: Any = None) -> bytes:
    return json.dumps([function, instance, [doc("bad")] if args is None else args, kwargs or {}]).encode()


def other_function(pool: Pool, marker: Path) -> str:
    return queue(pool).enqueue("os.mkdir", str(marker)).id


def pickled_job(pool: Pool, marker: Path) -> str:
    return queue(pool, PickleSerializer).enqueue(JOB_FUNCTION, Bomb(marker)).id


def pickled_meta(pool: Pool, marker: Path) -> str:
    return raw(pool, "pickledmeta", payload("os.mkdir", args=[str(marker)]), meta=pickle.dumps(Bomb(marker)))


def bound_method(pool: Pool, marker: Path) -> str:
    return raw(pool, "instance", payload(instance={"path": str(marker)}))


def callbacks(pool: Pool, marker: Path) -> str:
    mkdir = Callback("os.mkdir")
    return queue(pool).enqueue(JOB_FUNCTION, doc("bad"), on_success=mkdir, on_failure=mkdir, on_stopped=mkdir).id


def repeated(pool: Pool, marker: Path) -> str:
    return queue(pool).enqueue(JOB_FUNCTION, doc("bad"), repeat=Repeat(times=5)).id


def other_queue(pool: Pool, marker: Path) -> str:
    return raw(pool, "otherqueue", payload(), origin="default")


def extra_arguments(pool: Pool, marker: Path) -> str:
    return raw(pool, "arguments", payload(args=[doc("bad"), doc("bad")]))


def no_document(pool: Pool, marker: Path) -> str:
    return raw(pool, "nodocument", payload(args=["text"]))


def not_json(pool: Pool, marker: Path) -> str:
    return raw(pool, "notjson", b'["%s", null, [{"n": NaN}], {}]' % JOB_FUNCTION.encode())


def deep_json(pool: Pool, marker: Path) -> str:
    return raw(pool, "deepjson", b"[" * 1_000_000)


def garbage_hash(pool: Pool, marker: Path) -> str:
    return raw(pool, "garbage", b"\x00\xff garbage", created_at="yesterday", timeout=b"\xff", retries_left="many")


def no_data(pool: Pool, marker: Path) -> str:
    pool.redis.hset("rq:job:nodata", mapping={"status": "queued"})
    pool.redis.rpush(f"rq:queue:{QUEUE}", "nodata")
    return "nodata"


def oversize(pool: Pool, marker: Path) -> str:
    return raw(pool, "oversize", payload(args=[{"x": "y" * (MAX_DOCUMENT_BYTES + 200_000)}]))


def oversize_field(pool: Pool, marker: Path) -> str:
    return raw(pool, "oversizefield", payload(), description="y" * (MAX_DOCUMENT_BYTES + 200_000))


def inflates_to_gigabytes(pool: Pool, marker: Path) -> str:
    packer = zlib.compressobj(9)
    data = b"".join([packer.compress(b"[" * 50_000_000) for _ in range(4)]) + packer.flush()
    return raw(pool, "zipbomb", data)


def inflates_twice(pool: Pool, marker: Path) -> str:
    return raw(pool, "twice", zlib.compress(zlib.compress(payload())))


@pytest.mark.parametrize(
    "plant",
    [
        other_function,
        pickled_job,
        pickled_meta,
        bound_method,
        callbacks,
        repeated,
        other_queue,
        extra_arguments,
        no_document,
        not_json,
        deep_json,
        garbage_hash,
        no_data,
        oversize,
        oversize_field,
        inflates_to_gigabytes,
        inflates_twice,
    ],
)
async def test_it_fails_alone_and_typed(shared_pool: Pool, tmp_path: Path, plant: Callable[[Pool, Path], str]) -> None:
    from lenspool.queue import JobQueue

    pool, marker = shared_pool, tmp_path / "marker"
    bad = plant(pool, marker)
    client = JobQueue(pool.url)
    await client.open()
    try:
        assert await asyncio.wait_for(client.submit(CARD, doc(plant.__name__)).result(), 10) == {"n": plant.__name__}
    finally:
        await client.close()
    assert pool.workers[0].process.is_alive()
    assert not marker.exists() and "bad" not in pool.executions()
    assert pool.redis.hget(f"rq:job:{bad}", "status") == b"failed"
    assert 0 < pool.redis.ttl(f"rq:job:{bad}") <= 3600
    (_, fields), *_ = pool.redis.xrevrange(f"rq:results:{bad}", "+", "-", 1)
    result = Result.restore(bad, "0-0", fields, connection=pool.redis, serializer=StrictJSON)
    error = from_wire(result.exc_string)
    assert type(error) is InvalidJob and error.field in ("job", "document"), error


async def test_webhooks_are_not_called(shared_pool: Pool) -> None:
    called: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            called.append(self.path)
            self.send_response(200)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        hooks = [Webhook(url, "finished", method="POST"), Webhook(url, "failed", method="POST")]
        job = queue(shared_pool).enqueue(JOB_FUNCTION, doc("bad"), webhooks=hooks)
        await until(lambda: shared_pool.redis.hget(job.key, "status") == b"failed")
        await asyncio.sleep(0.3)
        assert called == [] and "bad" not in shared_pool.executions()
    finally:
        server.shutdown()
        server.server_close()


async def test_keys_that_are_no_jobs_are_dropped(shared_pool: Pool, connect_shared: Any) -> None:
    pool = shared_pool
    pool.redis.set("rq:job:astring", "x")
    for member in ("astring", "missing", "../../etc", b"\xff\xfe", "a b", ""):
        pool.redis.rpush(f"rq:queue:{QUEUE}", member)
    assert await asyncio.wait_for(connect_shared.submit(CARD, doc("after")).result(), 10) == {"n": "after"}
    assert pool.redis.llen(f"rq:queue:{QUEUE}") == 0


async def test_wrong_kind_of_key_under_the_job_of_a_client(shared_pool: Pool, connect_shared: Any) -> None:
    from lenspool.submission import encode

    job_id, _ = encode(doc("squatted"))
    shared_pool.redis.set(f"rq:job:{job_id}", "x")
    assert await asyncio.wait_for(connect_shared.submit(CARD, doc("squatted")).result(), 10) == {"n": "squatted"}


async def test_garbage_commands_are_ignored(shared_pool: Pool, connect_shared: Any) -> None:
    name = shared_pool.redis.zrange(keys.CARDS, 0, -1)[0].decode()
    for message in (b"\xff", b"[]", b"{}", b'{"command": 1}', b'{"command": "kill-horse"}', b'{"command": "stop-job"}'):
        shared_pool.redis.publish(f"rq:pubsub:{name}", message)
    assert await connect_shared.submit(CARD, doc("still")).result() == {"n": "still"}


async def test_unreadable_job_does_not_stop_recovery_of_others(pool: Pool, connect: Connect) -> None:
    async with connect() as client:
        ticket = client.submit(CARD, doc(1))
        await until(lambda: pool.queued() == 1)
        job = JsonJob.fetch(ticket.id, connection=pool.redis)
        # two jobs of a worker that is gone, of which one has a damaged hash
        for job_id in (ticket.id, "damaged"):
            pool.redis.hset(f"rq:job:{job_id}", mapping={"status": "started", "origin": job.origin})
            pool.redis.zadd(f"rq:wip:{QUEUE}", {f"{job_id}:execution": 1})
        pool.redis.hset("rq:job:damaged", mapping={"data": "x", "last_heartbeat": "yesterday"})
        pool.redis.delete(*pool.redis.smembers("rq:queues"))
        pool.worker()
        assert await asyncio.wait_for(ticket.result(), 10) == {"n": 1}
        assert pool.redis.hget("rq:job:damaged", "status") == b"failed"


def test_operator_tools_do_not_execute(pool: Pool, tmp_path: Path) -> None:
    """`rq info --queue-class lenspool.rq_json.JsonQueue` cleans registries, and so reads expired jobs."""
    marker = tmp_path / "marker"
    raw(pool, "bomb", pickle.dumps(Bomb(marker)), meta=pickle.dumps(Bomb(marker)), failure_callback_name="os.mkdir")
    pool.redis.hset("rq:job:bomb", "status", "started")
    pool.redis.zadd(f"rq:wip:{QUEUE}", {"bomb:execution": 1})
    tool = JsonQueue(QUEUE, connection=pool.redis)
    assert tool.started_job_registry.count == 0
    assert isinstance(tool.started_job_registry, StartedJobRegistry)
    assert tool.fetch_job("bomb") is None
    assert not marker.exists()
    Job.fetch("bomb", connection=pool.redis, serializer=PickleSerializer)  # as the stock tools do
    assert marker.exists()


def test_job_has_no_callable_even_when_its_name_is_allowed(pool: Pool) -> None:
    job = JsonQueue(QUEUE, connection=pool.redis).enqueue(JOB_FUNCTION, doc(1), retry=Retry(max=2))
    fetched = JsonJob.fetch(job.id, connection=pool.redis)
    assert fetched.document() == doc(1)
    with pytest.raises(InvalidJob):
        fetched.perform()
    assert isinstance(fetched, Job)


@pytest.fixture
async def connect_shared(shared_pool: Pool) -> Any:
    from lenspool.queue import JobQueue

    client = JobQueue(shared_pool.url)
    await client.open()
    yield client
    await client.close()
