"""What the queue costs: `make bench-queue`.

One run, side by side, against a Valkey of its own: jobs that do nothing through the pool (a real worker process, real
clients), through stock RQ, and through two bare Redis lists, which is the least that a queue could cost. The same with
a stand-in for an engine that has 64 seats and keeps each for 100 ms: through the pool, and driven directly. CPU per job
counts client, worker and server; ratios count, absolute times are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psutil
import redis
from rich.console import Console
from rich.table import Table
from rq import Queue, SimpleWorker, Worker

from lenspool import keys
from lenspool.broker import Broker
from lenspool.queue import JobQueue
from lenspool_worker.pool_worker import PoolWorker

CARD = "bench@0123456789ab"
CLIENTS = 64
SEATS, SEAT_S = 64, 0.1
GOAL_CPU_US, GOAL_P50_MS, GOAL_SHARE = 600.0, 5.0, 0.95

_SPAWN = multiprocessing.get_context("spawn")
_numbers = itertools.count()


class Cost(NamedTuple):
    """Seconds of a batch of jobs: on the clock, and of CPU in client, worker and server."""

    wall: float
    client: float
    worker: float
    server: float


# -- workers, each in a process of its own


async def nothing(document: dict[str, Any], job_id: str) -> dict[str, Any]:
    return {}


def seats() -> Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]:
    """An engine with so many seats, each taken for so long."""
    free = asyncio.Semaphore(SEATS)

    async def engine(document: dict[str, Any], job_id: str) -> dict[str, Any]:
        async with free:
            await asyncio.sleep(SEAT_S)
        return {}

    return engine


def serve_pool(url: str, engine: bool) -> None:
    async def main() -> None:
        handler = seats() if engine else nothing
        await PoolWorker({"id": CARD}, handler, connection=redis.Redis.from_url(url)).serve(signals=True)

    asyncio.run(main())


def serve_rq(url: str, fork: bool) -> None:
    kind = Worker if fork else SimpleWorker
    connection = redis.Redis.from_url(url)
    kind([Queue(connection=connection)], connection=connection).work(logging_level="ERROR")


def serve_lists(url: str) -> None:
    connection = redis.Redis.from_url(url, socket_timeout=None)
    connection.set("lists", 1)
    while True:
        _, job = connection.blpop(["jobs"])  # type: ignore[misc]
        connection.rpush("answers", job)


@contextlib.contextmanager
def running(target: Callable[..., None], *arguments: Any, ready: Callable[[], Any]) -> Iterator[psutil.Process]:
    process = _SPAWN.Process(target=target, args=arguments)
    process.start()
    try:
        while not ready():
            if not process.is_alive():
                raise RuntimeError("the worker did not start")
            time.sleep(0.02)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.join()


# -- measuring


def cpu(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children that have ended."""
    used = process.cpu_times()
    return float(used.user + used.system + used.children_user + used.children_system)


async def cost(worker: psutil.Process, server: psutil.Process, work: Awaitable[Any]) -> Cost:
    before, began = (time.process_time(), cpu(worker), cpu(server)), time.perf_counter()
    await work
    wall = time.perf_counter() - began
    after = time.process_time(), cpu(worker), cpu(server)
    return Cost(wall, *(b - a for a, b in zip(before, after, strict=True)))


async def latencies(one: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    """Milliseconds of single jobs with nothing beside them."""
    out = []
    for _ in range(count + 5):
        await asyncio.sleep(0.005)
        began = time.perf_counter()
        await one()
        out.append((time.perf_counter() - began) * 1e3)
    return sorted(out[5:])


def document() -> dict[str, Any]:
    return {"kind": "nothing", "n": next(_numbers)}


async def through_pool(clients: Sequence[JobQueue], count: int) -> None:
    tickets = [clients[i % len(clients)].submit(CARD, document()) for i in range(count)]
    await asyncio.gather(*(ticket.result() for ticket in tickets))


async def through_rq(queue: Queue, count: int) -> None:
    pause, before = 0.02, queue.finished_job_registry.get_job_count(cleanup=False)
    for _ in range(0, count, 250):
        queue.enqueue_many([Queue.prepare_data("operator.pos", args=(1,)) for _ in range(min(250, count))])
    while queue.finished_job_registry.get_job_count(cleanup=False) - before < count:
        await asyncio.sleep(pause)


async def through_lists(connection: redis.Redis, count: int) -> None:
    for i in range(count):
        connection.rpush("jobs", i)
        connection.blpop(["answers"])


async def pool_rows(url: str, server: psutil.Process, jobs: int, singles: int) -> tuple[Cost, list[float], float]:
    """Cost of many jobs that do nothing, latencies of single ones, and the share of an engine's throughput."""
    probe = redis.Redis.from_url(url)
    clients = [JobQueue(url) for _ in range(CLIENTS)]
    await asyncio.gather(*(client.open() for client in clients))
    try:
        with running(serve_pool, url, False, ready=lambda: probe.zcard(keys.CARDS)) as worker:
            await through_pool(clients, jobs // 4)
            many = await cost(worker, server, through_pool(clients, jobs))
            times = await latencies(lambda: clients[0].submit(CARD, document()).result(), singles)
        with running(serve_pool, url, True, ready=lambda: probe.zcard(keys.CARDS)) as worker:
            shares = [await share(clients, jobs) for _ in range(3)]
        return many, times, statistics.median(shares)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def share(clients: Sequence[JobQueue], jobs: int) -> float:
    """Throughput of the pool's engine over that of the same engine driven directly."""
    engine, began = seats(), time.perf_counter()
    await asyncio.gather(*(engine({}, "") for _ in range(jobs)))
    directly = time.perf_counter() - began
    await through_pool(clients, jobs)
    return directly / (time.perf_counter() - began - directly)


async def rq_rows(url: str, server: psutil.Process, jobs: int, singles: int, *, fork: bool) -> tuple[Cost, list[float]]:
    connection = redis.Redis.from_url(url)
    queue = Queue(connection=connection)

    async def one() -> None:
        queue.enqueue("operator.pos", 1).latest_result(timeout=10)

    with running(serve_rq, url, fork, ready=lambda: Worker.all(connection)) as worker:
        await through_rq(queue, 10)
        many = await cost(worker, server, through_rq(queue, jobs))
        return many, await latencies(one, singles)


async def list_rows(url: str, server: psutil.Process, jobs: int, singles: int) -> tuple[Cost, list[float]]:
    connection = redis.Redis.from_url(url, socket_timeout=None)
    with running(serve_lists, url, ready=lambda: connection.exists("lists")) as worker:
        many = await cost(worker, server, through_lists(connection, jobs))
        return many, await latencies(lambda: through_lists(connection, 1), singles)


async def measure(jobs: int, singles: int) -> tuple[dict[str, tuple[int, Cost, list[float]]], float]:
    rows: dict[str, tuple[int, Cost, list[float]]] = {}
    with Broker() as broker:
        server = psutil.Process(broker.pid)
        rows["two lists"] = (jobs, *await list_rows(broker.url, server, jobs, singles))
        *pool, share = await pool_rows(broker.url, server, jobs, singles)
        rows["pool"] = (jobs, *pool)
        few = max(jobs // 4, 10)
        rows["rq SimpleWorker"] = (few, *await rq_rows(broker.url, server, few, singles, fork=False))
        few = max(jobs // 40, 10)
        rows["rq Worker"] = (few, *await rq_rows(broker.url, server, few, singles, fork=True))
    return rows, share


def show(rows: dict[str, tuple[int, Cost, list[float]]], share: float) -> None:
    table = Table("way", "jobs/s", "CPU µs a job", "client", "worker", "server", "p50 ms", "p99 ms")
    for name, (count, spent, times) in rows.items():
        parts = [part / count * 1e6 for part in spent[1:]]
        p99 = times[min(int(len(times) * 0.99), len(times) - 1)]
        table.add_row(
            name,
            f"{count / spent.wall:.0f}",
            *(f"{value:.0f}" for value in (sum(parts), *parts)),
            f"{statistics.median(times):.2f}",
            f"{p99:.2f}",
        )
    count, spent, times = rows["pool"]
    goals = Table("goal", "at most", "here")
    goals.add_row("CPU µs a job in all", f"{GOAL_CPU_US:.0f}", f"{sum(spent[1:]) / count * 1e6:.0f}")
    goals.add_row("p50 ms of a single job", f"{GOAL_P50_MS:.0f}", f"{statistics.median(times):.2f}")
    goals.add_row(f"share of an engine, {CLIENTS} clients", f"at least {GOAL_SHARE}", f"{share:.3f}")
    cores, load = os.cpu_count(), os.getloadavg()[0]
    for shown in (table, goals, f"{cores} cores, load {load:.1f}"):
        Console(width=110).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=4000, help="jobs at once; stock RQ gets a part of them")
    parser.add_argument("--singles", type=int, default=100, help="jobs one after the other")
    arguments = parser.parse_args()
    show(*asyncio.run(measure(arguments.jobs, arguments.singles)))


if __name__ == "__main__":
    main()
