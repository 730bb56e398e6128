"""How many jobs of a model are where, from RQ's queues and registries."""

from __future__ import annotations

import redis.asyncio
from rq import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry

from lenspool import keys

_REGISTRIES = {"running": StartedJobRegistry, "finished": FinishedJobRegistry, "failed": FailedJobRegistry}


async def job_counts(connection: redis.asyncio.Redis, card_id: str) -> dict[str, int]:
    """Jobs `queued`, `running`, `finished` and `failed` (the last two for as long as RQ remembers them)."""
    name = keys.queue_name(card_id)
    queues = (name, keys.suspects_name(card_id), keys.alone_name(card_id))
    async with connection.pipeline(transaction=False) as pipeline:
        for queue in queues:
            pipeline.llen(Queue.redis_queue_namespace_prefix + queue)
        for registry in _REGISTRIES.values():
            pipeline.zcard(registry.key_template.format(name))
        replies = await pipeline.execute()
    counts = dict(zip(_REGISTRIES, replies[len(queues) :], strict=True))
    return {"queued": sum(replies[: len(queues)]), **counts}
