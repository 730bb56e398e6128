"""How many jobs of a model are where, from RQ's queues and registries."""

from __future__ import annotations

import time
from typing import Any

import redis.asyncio
from rq import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.utils import utcparse

from lenspool import keys
from lenspool.submission import JOB_PREFIX
from lenspool.terms import PRIORITIES

_REGISTRIES = {"running": StartedJobRegistry, "finished": FinishedJobRegistry, "failed": FailedJobRegistry}
_RETURNED = "returned"
"""Jobs that lost their worker, and wait to be run again."""


async def job_counts(connection: redis.asyncio.Redis, card_id: str) -> dict[str, Any]:
    """Jobs of a model by where they are.

    Returns
    -------
    dict
        `queued`, `running`, `finished` and `failed` (the last two for as long as RQ remembers them); `lanes`: for
        `interactive`, `batch` and `returned` (jobs that lost their worker) how many are `queued`, and `oldest`, the
        seconds for which the first in each client's queue has waited, at most.
    """
    name = keys.queue_name(card_id)
    prefix = Queue.redis_queue_namespace_prefix
    commands: Any = connection  # redis-py types a command as either sync or async
    places = {key.decode(): _lane(key.decode()) for key in await commands.zrange(keys.ring(card_id), 0, -1)}
    for returned in (name, keys.suspects_name(card_id), keys.alone_name(card_id)):
        places[prefix + returned] = _RETURNED
    async with connection.pipeline(transaction=False) as pipeline:
        for place in places:
            pipeline.llen(place)
            pipeline.lindex(place, 0)
        for registry in _REGISTRIES.values():
            pipeline.zcard(registry.key_template.format(name))
        replies = await pipeline.execute()
    queued = dict(zip(places, replies[: 2 * len(places) : 2], strict=True))
    first = [job for job in replies[1 : 2 * len(places) : 2] if job]
    since = await _enqueued(connection, [job.decode() for job in first])
    heads = dict(zip([place for place, n in queued.items() if n], since, strict=False))
    lanes: dict[str, dict[str, Any]] = {lane: {"queued": 0, "oldest": 0.0} for lane in (*PRIORITIES, _RETURNED)}
    for place, lane in places.items():
        lanes[lane]["queued"] += queued[place]
        lanes[lane]["oldest"] = max(lanes[lane]["oldest"], heads.get(place, 0.0))
    counts = dict(zip(_REGISTRIES, replies[2 * len(places) :], strict=True))
    return {"queued": sum(queued.values()), **counts, "lanes": lanes}


def _lane(place: str) -> str:
    lane = place.rsplit(":", 2)[-2]
    return lane if lane in PRIORITIES else _RETURNED


async def _enqueued(connection: redis.asyncio.Redis, jobs: list[str]) -> list[float]:
    """Seconds since each job was queued; 0 of one that is gone."""
    async with connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.hget(JOB_PREFIX + job, "enqueued_at")
        replies = await pipeline.execute() if jobs else []
    now = time.time()
    return [max(now - utcparse(raw.decode()).timestamp(), 0.0) if raw else 0.0 for raw in replies]
