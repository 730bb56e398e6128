"""The way of one call: look in the store, run what is missing, open the result."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lenspool.access import Access, Found
from lenspool.errors import DeadlineExceeded
from lenspool.job import Request, job_id
from lenspool.queue import JobQueue, JobTicket
from lenspool.result import Capture, Generation
from lenspool.streaming import Delta, Tell
from lenspool.token_feed import TokenFeed
from lenspool.tokenizer import Tokenizer
from lenspool_cache import CacheError
from lenspool_cache import ranges as rg

ResultT = TypeVar("ResultT", Capture, Generation)

_ATTEMPTS = 3
"""How often a job is sent when the store loses its rows between their writing and their reading (eviction)."""


@dataclass(frozen=True)
class Desk:
    """Answers the calls of one client about one model."""

    queue: JobQueue
    feed: TokenFeed
    access: Access
    tokenizer: Tokenizer | None

    async def answer(
        self, request: Request, result: type[ResultT], timeout: float | None, tell: Tell | None = None
    ) -> ResultT:
        """The result of a request; `tell` hears of a generation's tokens meanwhile, some of them perhaps twice."""
        found = await self.access.find(request, ran=False)
        job: dict[str, Any] = {}
        began = time.monotonic()
        for attempt in range(_ATTEMPTS):
            if found.complete:
                break
            await asyncio.gather(*(self.access.put_array(digest, a) for digest, a in request.arrays.items()))
            document = request.document(found.missing)
            listening: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
            if tell is not None and found.generation is not None:
                tell(Delta(0, found.generation["token_ids"], found.generation["text"] or "", 0))
            elif tell is not None:
                listening = self.feed.listening(request.card.id, job_id(document), tell)
            async with listening:
                ticket = self.queue.submit(request.card.id, document, fresh=attempt > 0)
                job = await _wait(ticket, timeout)
            found = await self.access.find(request, ran=True)
        if not found.complete:
            raise CacheError(f"the rows of {request.run} were computed {_ATTEMPTS} times, and are not in the store")
        return _result(request, result, found, self.tokenizer, job, time.monotonic() - began)


async def _wait(ticket: JobTicket, timeout: float | None) -> dict[str, Any]:
    """Await a job; at the deadline say where it stood, and give it up."""
    waiting = asyncio.ensure_future(ticket.result())
    try:
        done, _ = await asyncio.wait([waiting], timeout=timeout)
        if not done:
            stage = "run" if await ticket.status() == "started" else "queue"
            raise DeadlineExceeded(stage, timeout or 0.0, job_id=ticket.id)
        job = waiting.result()
        # of a job that had finished before, nothing was computed for this call
        return {**job, "computed_rows": 0, "run_s": 0.0, "generated": False} if ticket.reused else job
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


def _result(
    request: Request,
    result: type[ResultT],
    found: Found,
    tokenizer: Tokenizer | None,
    job: Mapping[str, Any],
    seconds: float,
) -> ResultT:
    """Put a result object together from what was found."""
    assert found.reader is not None
    ranges = found.ranges(request)
    rows = sum(rg.count(found.ranges(request, name)) for name in request.hooks)
    computed = min(int(job.get("computed_rows", 0)), rows)
    run_s = float(job.get("run_s", 0.0))
    provenance = {
        "model": request.card.id,
        **request.card.context["numerics"],
        "computed_rows": computed,
        "reused_rows": rows - computed,
        "queue_s": max(seconds - run_s, 0.0) if job else 0.0,
        "run_s": run_s,
        "worker": job.get("worker"),
        "keys": {name: request.run.entry(name).hex() for name in request.hooks},
    }
    rest: dict[str, Any] = {
        "hooks": request.hooks,
        "positions": np.array(rg.positions(ranges), dtype=np.int64),
        "reader": found.reader,
        "cached": not job or (computed == 0 and not job.get("generated", False)),
        "provenance": provenance,
    }
    made: dict[str, Any] | None = found.generation
    generated: list[int] = made["token_ids"] if made is not None else []
    ids = [*request.tokens, *generated]
    rest |= {"token_ids": ids} if made is None else {"generation": made, "prompt": request.tokens}
    return result(request.card, tokens=tokenizer.tokens(ids) if tokenizer else None, **rest)
