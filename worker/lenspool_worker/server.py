"""A worker's life: engine, store, card and pool worker, from start to clean stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from lenspool import keys
from lenspool.card import ModelCard
from lenspool.errors import EngineFailed, PoolUnavailable
from lenspool.guard import refuse_open_redis
from lenspool_cache import Store
from lenspool_worker.engine import Engine
from lenspool_worker.fingerprint import fingerprint
from lenspool_worker.housekeeping import keep_limits, keep_uploaded, set_limits, set_lower
from lenspool_worker.jobs import JobRunner
from lenspool_worker.leases import QueueLimits
from lenspool_worker.metrics import endpoint
from lenspool_worker.model_card import make_card, model_name, tokenizer_blob
from lenspool_worker.pool_worker import PoolWorker
from lenspool_worker.room import Room, default_budget
from lenspool_worker.supervisor import Supervisor
from lenspool_worker.token_streams import TokenStreams

log = logging.getLogger(__name__)

TOKENIZER_TTL = 24 * 3600
_STATS_EVERY = 1.0
_BUSY_READINGS = 60
"""Readings of the engine at work whose upper quartile says how fast it is: many are of seconds that it partly idled."""
_REFRESH = 60.0
"""Seconds between two writings of the tokenizer: a Redis that came back empty has it again after one."""


@dataclass(frozen=True)
class Settings:
    """How a worker is set up; belongs to who starts it, never to a job.

    Attributes
    ----------
    model
        Model folder, or the name of a model on the Hugging Face hub.
    engine
        Arguments of vLLM's `AsyncEngineArgs`, e.g. `{"max_num_batched_tokens": 64}`.
    insecure
        Accept a Redis on another machine that asks no password.
    per_client
        Jobs of one client at a time, here and in the other workers that limit them.
    client_queue, model_queue
        Most jobs that may wait, see `QueueLimits`.
    cache_bytes, cache_days
        New limits of the store, 0 for none; with None it keeps those that it has.
    held_bytes
        Bytes of rows that the jobs in flight may hold together; default a quarter of the machine's memory.
    metrics_port
        Port of the Prometheus endpoint, on loopback; None opens none, 0 any free one.
    lower
        Folders or URLs, separated by commas, of stores that lie under this one and are only read; with None the store
        keeps those that it has.
    upload
        URL of a bucket that gets what the store gets.
    """

    model: str
    redis: str
    store: Path
    name: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    max_in_flight: int = 256
    insecure: bool = False
    per_client: int | None = None
    client_queue: int = QueueLimits().client
    model_queue: int = QueueLimits().model
    metrics_port: int | None = None
    held_bytes: int | None = None
    cache_bytes: int | None = None
    cache_days: float | None = None
    lower: str | None = None
    upload: str | None = None


def model_folder(model: str) -> Path:
    """The folder of a model: a path, or the snapshot of a hub model."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise EngineFailed(f"there is no model folder {model}")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model))


@contextlib.asynccontextmanager
async def started(settings: Settings) -> AsyncIterator[tuple[Engine, Store, ModelCard, bytes | None]]:
    """A started engine with its store and card; stopped at the end."""
    folder = model_folder(settings.model)
    loop = asyncio.get_running_loop()
    digest = loop.run_in_executor(None, fingerprint, folder)
    blob = await loop.run_in_executor(None, tokenizer_blob, folder)
    if settings.lower is not None:
        set_lower(settings.store, settings.lower)
    with Store(settings.store) as store:
        set_limits(store, settings.cache_bytes, settings.cache_days)
        engine = Engine(str(folder), store, settings.engine)
        await engine.start()
        try:
            worker = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
            card = make_card(
                engine,
                name=settings.name or model_name(folder),
                fingerprint=await digest,
                tokenizer=blob,
                store=store,
                worker=worker,
            )
            yield engine, store, card, blob
        finally:
            await engine.stop()


async def serve(settings: Settings, ready: Callable[[ModelCard], None], stop: asyncio.Event) -> None:
    """Run a worker until `stop` is set or SIGTERM or SIGINT arrives; running jobs finish or go back to the queue.

    Raises
    ------
    EngineFailed
        The engine did not start, or died too often while serving.
    PoolUnavailable
        Redis cannot be reached, or is open to strangers.
    """
    if not settings.insecure:
        await asyncio.to_thread(refuse_open_redis, settings.redis)
    connection = redis.Redis.from_url(settings.redis)
    try:
        await asyncio.to_thread(connection.ping)
    except redis.exceptions.RedisError as error:
        raise PoolUnavailable(f"no Redis at {settings.redis}: {error}") from error
    async with started(settings) as (engine, store, card, blob), redis.asyncio.Redis.from_url(settings.redis) as aredis:
        published = card.to_dict()
        streams = TokenStreams(aredis, card.id)
        runner = JobRunner(engine, store, card, aredis, streams, Room(settings.held_bytes or default_budget()))
        worker = PoolWorker(
            published,
            runner,
            connection=connection,
            max_in_flight=settings.max_in_flight,
            per_client=settings.per_client,
            limits=QueueLimits(settings.client_queue, settings.model_queue),
        )
        runner.room.full = partial(_hold_for_bytes, worker)
        supervisor = Supervisor(engine, worker, partial(_same, settings, card))
        supervising = asyncio.create_task(supervisor.run())
        supervising.add_done_callback(lambda _: worker.stop())
        await _publish_tokenizer(aredis, card, blob)
        helpers = [
            asyncio.create_task(_keep_tokenizer(aredis, card, blob)),
            asyncio.create_task(_stop_when(stop, worker)),
            asyncio.create_task(_keep_stats(engine, supervisor, worker, runner, published)),
            asyncio.create_task(streams.watch()),
            asyncio.create_task(keep_limits(store)),
            *([asyncio.create_task(keep_uploaded(store, settings.upload))] if settings.upload else []),
        ]
        announced = asyncio.create_task(_announce(aredis, card, ready))
        try:
            with endpoint(published, settings.metrics_port) as port:
                published["metrics_port"] = port
                await worker.serve(signals=True)
        finally:
            gave_up = supervising.done()
            for task in (*helpers, announced, supervising):
                task.cancel()
            await asyncio.gather(*helpers, announced, supervising, return_exceptions=True)
        if gave_up:
            supervising.result()


async def _publish_tokenizer(connection: redis.asyncio.Redis, card: ModelCard, blob: bytes | None) -> None:
    if card.tokenizer is not None and blob is not None:
        await connection.set(keys.tokenizer(card.tokenizer), blob, ex=TOKENIZER_TTL)


async def _keep_tokenizer(connection: redis.asyncio.Redis, card: ModelCard, blob: bytes | None) -> None:
    while True:
        await asyncio.sleep(_REFRESH)
        try:
            await _publish_tokenizer(connection, card, blob)
        except redis.exceptions.RedisError as error:
            log.warning("tokenizer not published, next try in %g s: %s", _REFRESH, error)


async def _same(settings: Settings, card: ModelCard) -> bool:
    """Whether the model's files are those of the card."""
    try:
        return await asyncio.to_thread(fingerprint, model_folder(settings.model)) == card.context["model"]
    except OSError:
        return False


async def _keep_stats(
    engine: Engine, supervisor: Supervisor, worker: PoolWorker, runner: JobRunner, published: dict[str, Any]
) -> None:
    """Write counters into the card, which the next heartbeat publishes."""
    counts: dict[str, Any] = {}
    busy: deque[float] = deque(maxlen=_BUSY_READINGS)
    while True:
        before, since = counts, published.get("stats", {}).get("time", 0.0)
        try:
            counts = await engine.stats()
            state = "serving"
        except EngineFailed:
            state = "restarting"
        rates = _rates(before, counts, time.time() - since)
        busy.extend([rates["tokens_per_s"]] if rates["tokens_per_s"] and since else [])
        published["stats"] = {
            **counts,
            **worker.stats,
            **runner.rows,
            **rates,
            "busy_tokens_per_s": sorted(busy)[3 * len(busy) // 4] if busy else 0.0,
            "state": state,
            "restarts": supervisor.restarts,
            "time": time.time(),
        }
        await asyncio.sleep(_STATS_EVERY)


def _rates(before: dict[str, Any], now: dict[str, Any], seconds: float) -> dict[str, float]:
    """Tokens per second and per step between two readings of the engine's counters."""
    tokens, steps = (max(now.get(name, 0) - before.get(name, 0), 0) for name in ("tokens", "steps"))
    return {"tokens_per_s": round(tokens / seconds, 1), "batch_tokens": round(tokens / steps, 1) if steps else 0.0}


async def _announce(connection: redis.asyncio.Redis, card: ModelCard, ready: Callable[[ModelCard], None]) -> None:
    """Call `ready` once clients can see the card."""
    while not await connection.exists(keys.card(card.worker)):
        await asyncio.sleep(0.05)
    ready(card)


def _hold_for_bytes(worker: PoolWorker, waiting: bool) -> None:
    """Take no more jobs while one of those that were taken waits for memory."""
    if waiting:
        worker.hold("bytes")
    else:
        worker.release("bytes")


async def _stop_when(stop: asyncio.Event, worker: PoolWorker) -> None:
    await stop.wait()
    worker.stop()
