"""One job in an engine of its own: how a stock `rq worker` runs it, to look at it closely. Slow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import redis.asyncio

from lenspool_worker.jobs import JobRunner
from lenspool_worker.room import Room, default_budget
from lenspool_worker.server import Settings, started
from lenspool_worker.token_streams import TokenStreams


def settings() -> Settings:
    """From `LENSPOOL_MODEL`, `LENSPOOL_REDIS`, `LENSPOOL_STORE` and, where the worker has one, `LENSPOOL_NAME`."""
    return Settings(
        model=os.environ["LENSPOOL_MODEL"],
        redis=os.environ["LENSPOOL_REDIS"],
        store=Path(os.environ["LENSPOOL_STORE"]),
        name=os.environ.get("LENSPOOL_NAME"),
    )


async def run_single(document: dict[str, Any], job_id: str) -> dict[str, Any]:
    """Boot an engine, run the job, stop the engine."""
    chosen = settings()
    async with started(chosen) as (engine, store, card, _), redis.asyncio.Redis.from_url(chosen.redis) as connection:
        streams, room = TokenStreams(connection, card.id), Room(default_budget())
        return await JobRunner(engine, store, card, connection, streams, room)(document, job_id)
