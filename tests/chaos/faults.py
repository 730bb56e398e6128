"""What the storm does to a pool: each fault is done once, and left to heal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import redis

from lenspool import Client, keys
from lenspool.broker import Broker
from lenspool.rq_json import JOB_FUNCTION, JsonQueue
from tests.queue.test_chaos import malformed

CANCELLED, FLOOD = 200, 5000

_CLIENT = """
import asyncio, sys
from lenspool import Client
async def main():
    async with Client(sys.argv[1], store=sys.argv[2]) as client:
        asks = [client.generate([7, i % 400 + 1, i // 400 + 1], max_tokens=100, ignore_eos=True) for i in range(200)]
        print("asking", flush=True)
        await asyncio.gather(*asks)
asyncio.run(main())
"""


class Site:
    """A server, a store, and workers that somebody starts again when they end, as a service manager would.

    Parameters
    ----------
    folder
        For the data of the server and the store.
    model
        Folder of the model that the workers serve.
    workers
        How many.
    """

    def __init__(self, folder: Path, model: Path, workers: int) -> None:
        self.broker = Broker(folder / "redis", appendonly=True)
        self.store, self.data = folder / "store", folder / "redis"
        self._model, self._log = model, folder / "workers.log"
        self.workers: list[subprocess.Popen[bytes] | None] = [None] * workers

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The server; and no worker is left in the end."""
        with self.broker:
            try:
                yield
            finally:
                for worker in self.workers:
                    if worker is not None:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(worker.pid, signal.SIGKILL)
                        worker.wait()

    async def keep(self) -> None:
        """Start workers, and again those that ended."""
        command = [sys.executable, "-m", "lenspool.cli", "worker", "--no-compiled", "--model", str(self._model)]
        command += ["--redis", self.broker.url, "--store", str(self.store)]
        # else vLLM gives each worker all cores but one, and the threads of one that works keep the other from booting
        cores = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        while True:
            for i, worker in enumerate(self.workers):
                if worker is None or worker.poll() is not None:
                    with self._log.open("ab") as log:
                        self.workers[i] = subprocess.Popen(
                            command, stdout=log, stderr=log, start_new_session=True, env=cores
                        )
            await asyncio.sleep(0.2)

    def worker(self) -> subprocess.Popen[bytes]:
        """One that runs."""
        return next(worker for worker in self.workers if worker is not None and worker.poll() is None)

    def processes(self, name: str) -> list[psutil.Process]:
        """Processes of that worker by vLLM's title."""
        children = psutil.Process(self.worker().pid).children(recursive=True)
        return [child for child in children if name in " ".join(child.cmdline())]


async def kill_worker(site: Site, client: Client) -> None:
    """SIGKILL to a worker and all its processes."""
    os.killpg(site.worker().pid, signal.SIGKILL)


async def kill_engine(site: Site, client: Client) -> None:
    """SIGKILL to vLLM's process under a worker."""
    (process,) = site.processes("VLLM::Worker")
    process.kill()


async def suspend_worker(site: Site, client: Client) -> None:
    """SIGSTOP to a worker for 20 s, twice its lease; then SIGCONT."""
    group = site.worker().pid
    os.killpg(group, signal.SIGSTOP)
    await asyncio.sleep(20)
    os.killpg(group, signal.SIGCONT)


async def kill_client(site: Site, client: Client) -> None:
    """SIGKILL to a client that waits for 200 answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, site.broker.url, str(site.store), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    await asyncio.sleep(0.5)
    process.kill()
    await process.wait()


async def restart_redis(site: Site, client: Client) -> None:
    """SIGKILL to the server; 2 s later it is there again with its append-only file."""
    site.broker.kill()
    await asyncio.sleep(2)
    site.broker.start()


async def empty_redis(site: Site, client: Client) -> None:
    """SIGKILL to the server; 2 s later it is there again, empty."""
    site.broker.kill()
    for file in sorted(site.data.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    await asyncio.sleep(2)
    site.broker.start()


async def suspend_redis(site: Site, client: Client) -> None:
    """SIGSTOP to the server for 30 s; then SIGCONT."""
    os.kill(site.broker.pid, signal.SIGSTOP)
    await asyncio.sleep(30)
    os.kill(site.broker.pid, signal.SIGCONT)


async def malformed_jobs(site: Site, client: Client) -> None:
    """500 malformed jobs, written into the model's queue."""
    card, rng = (await client.card()).id, random.Random(1)
    with redis.Redis.from_url(site.broker.url) as connection:
        queue = JsonQueue(keys.queue_name(card), connection=connection)
        job = queue.create_job(JOB_FUNCTION, args=({"kind": "capture"},), timeout=60)
        good = job.to_dict() | {"status": "queued", "data": job.data}
        with connection.pipeline() as pipeline:
            for _ in range(500):
                name = f"bad-{rng.randrange(10**12)}"
                pipeline.hset(f"rq:job:{name}", mapping=malformed(rng, good))
                pipeline.rpush(queue.key, name)
            pipeline.sadd("rq:queues", queue.key)
            pipeline.execute()


async def cancellations(site: Site, client: Client) -> None:
    """200 calls, each cancelled within 3 s."""
    rng = random.Random(2)

    async def one(i: int) -> None:
        asked = asyncio.create_task(client.generate([9, i % 400 + 1, rng.randrange(1, 400)], max_tokens=200))
        await asyncio.sleep(rng.uniform(0, 3))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    await asyncio.gather(*(one(i) for i in range(CANCELLED)))


async def flood(site: Site, client: Client) -> None:
    """5000 calls of another client at once."""
    async with Client(site.broker.url, store=site.store) as other:
        rng = random.Random(3)
        asks = [other.capture([rng.randrange(1, 500) for _ in range(4)], "resid_post.0") for _ in range(FLOOD)]
        await asyncio.gather(*asks)


FAULTS: tuple[Callable[[Site, Client], Awaitable[None]], ...] = (
    kill_worker,
    kill_engine,
    suspend_worker,
    kill_client,
    restart_redis,
    empty_redis,
    suspend_redis,
    malformed_jobs,
    cancellations,
    flood,
)
