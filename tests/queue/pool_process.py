"""A worker process for the tests: a real `PoolWorker` with small handlers, told apart by `document["do"]`.

Every execution is written to a file before it runs, so that tests can count them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import redis

from lenspool.errors import EngineFailed, InvalidJob
from lenspool_worker.leases import QueueLimits
from lenspool_worker.pool_worker import PoolWorker


class Died(EngineFailed):
    """An engine that is gone: the job itself is not at fault."""

    retryable = True
    requeue = True


class Handlers:
    def __init__(self, log: Path) -> None:
        self._log = log

    async def __call__(self, document: dict[str, Any], job_id: str) -> dict[str, Any]:
        with self._log.open("a") as stream:
            stream.write(f"{document['n']} {os.getpid()}\n")
        return await getattr(self, document["do"])(document)

    async def echo(self, document: dict[str, Any]) -> dict[str, Any]:
        return {"n": document["n"]}

    async def sleep(self, document: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(document["s"])
        return {"n": document["n"], "pid": os.getpid()}

    async def fail(self, document: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.2)
        raise InvalidJob("positions", "out of range", "0 to 7")

    async def crash(self, document: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("division by zero")

    async def odd_error(self, document: dict[str, Any]) -> dict[str, Any]:
        raise InvalidJob(object(), "a field that is not JSON")  # type: ignore[arg-type]

    async def long_error(self, document: dict[str, Any]) -> dict[str, Any]:
        raise EngineFailed("x" * 5_000_000)

    async def cancel_itself(self, document: dict[str, Any]) -> dict[str, Any]:
        raise asyncio.CancelledError

    async def kill(self, document: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    async def block_once(self, document: dict[str, Any]) -> dict[str, Any]:
        """Block the event loop, the first time."""
        if self._log.read_text().split().count(str(document["n"])) == 1:
            time.sleep(document["s"])
        return {"n": document["n"], "pid": os.getpid()}

    async def engine_died(self, document: dict[str, Any]) -> dict[str, Any]:
        raise Died("the engine is gone")

    async def too_large(self, document: dict[str, Any]) -> dict[str, Any]:
        return {"x": "x" * 2_000_000}


async def serve(settings: dict[str, Any]) -> dict[str, int]:
    options = dict(settings["options"])
    if "limits" in options:
        options["limits"] = QueueLimits(*options["limits"])
    worker = PoolWorker(
        {"id": settings["card"]},
        Handlers(Path(settings["log"])),
        connection=redis.Redis.from_url(settings["url"]),
        **options,
    )
    await worker.serve(signals=True)
    return worker.stats


def run(settings: dict[str, Any], out: str, stats: str) -> None:
    """The process: serve, with stderr in a file; leave the counters in another at a clean end."""
    with Path(out).open("wb") as stream:
        os.dup2(stream.fileno(), 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
    Path(stats).write_text(json.dumps(asyncio.run(serve(settings))))
