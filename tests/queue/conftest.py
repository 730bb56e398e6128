from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from lenspool import keys
from lenspool.broker import Broker
from lenspool.queue import JobQueue, JobTicket
from tests.queue import pool_process

CARD = "tiny@0123456789ab"
SHORT = {"lease": 2.0, "beat": 0.4, "reap": 0.4, "grace": 10.0}
"""Leases for tests: a lost worker is noticed after 2 to 3 s."""
LOST_S = SHORT["lease"] + SHORT["reap"] + 4.0
"""By when jobs of a lost worker must have left it, on a machine that is busy."""


# workers are forked from a process that has the imports already: separate processes, started in milliseconds
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["tests.queue.pool_process"])


class WorkerProcess:
    def __init__(self, url: str, log: Path, out: Path, options: dict[str, Any]) -> None:
        settings = {"url": url, "card": CARD, "log": str(log), "options": SHORT | options}
        self.out = out
        self._stats = out.with_suffix(".json")
        self.process = _FORK.Process(target=pool_process.run, args=(settings, str(out), str(self._stats)))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 20.0) -> dict[str, int]:
        """Counters of a worker that stops on its own."""
        self.process.join(timeout)
        assert self.process.exitcode == 0, self.out.read_text()
        return json.loads(self._stats.read_text())

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Pool:
    """A server, worker processes and what they executed."""

    def __init__(self, broker: Broker, folder: Path) -> None:
        self.broker, self.folder = broker, folder
        self.url = broker.url
        self.log = folder / "executions"
        self.log.touch()
        self.redis = redis.Redis.from_url(self.url)
        self.workers: list[WorkerProcess] = []

    def worker(self, *, wait: bool = True, **options: Any) -> WorkerProcess:
        worker = WorkerProcess(self.url, self.log, self.folder / f"worker{len(self.workers)}", options)
        self.workers.append(worker)
        if wait:
            before = time.monotonic()
            while not any(str(worker.pid) in name.decode() for name in self.redis.zrange(keys.CARDS, 0, -1)):
                assert time.monotonic() < before + 20, worker.out.read_text()
                time.sleep(0.02)
        return worker

    def queued(self) -> int:
        """Jobs that wait in any of the rq queues."""
        return sum(self.redis.llen(key) for key in self.redis.smembers("rq:queues"))

    def executions(self) -> Counter[str]:
        """How often each document was run, by its `n`."""
        return Counter(line.split()[0] for line in self.log.read_text().splitlines())

    def end(self) -> None:
        for worker in self.workers:
            worker.end()
        self.redis.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Broker(tmp_path / "data", appendonly=True) as broker:
        made = Pool(broker, tmp_path)
        try:
            yield made
        finally:
            made.end()


@pytest.fixture(scope="module")
def shared_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One worker for tests that leave it as it was."""
    with Broker() as broker:
        pool = Pool(broker, tmp_path_factory.mktemp("pool"))
        try:
            pool.worker()
            yield pool
        finally:
            pool.end()


Connect = Callable[..., "contextlib.AbstractAsyncContextManager[JobQueue]"]


@pytest.fixture
def connect(pool: Pool) -> Connect:
    @contextlib.asynccontextmanager
    async def open_queue(**options: Any) -> AsyncIterator[JobQueue]:
        queue = JobQueue(pool.url, **({"sweep": 1.0, "patience": 60.0} | options))
        await queue.open()
        try:
            yield queue
        finally:
            await queue.close()

    return open_queue


def doc(n: Any, do: str = "echo", **more: Any) -> dict[str, Any]:
    return {"do": do, "n": n, **more}


async def until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        await asyncio.sleep(0.02)


async def started(ticket: JobTicket, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while await ticket.status() != "started":
        assert time.monotonic() < end, await ticket.status()
        await asyncio.sleep(0.02)
