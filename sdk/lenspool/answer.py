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
from lenspool.generation import Generation
from lenspool.job import Request, job_id
from lenspool.queue import JobQueue
from lenspool.result import Capture
from lenspool.streaming import Delta, Tell
from lenspool.terms import Terms, check_seconds
from lenspool.ticket import answer_of
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
        self,
        request: Request,
        result: type[ResultT],
        timeout: float | None,
        terms: Terms,
        *,
        tell: Tell | None = None,
        whole: bool = False,
    ) -> ResultT:
        """The result of a request.

        Parameters
        ----------
        tell
            Hears of a generation's tokens meanwhile, of some of them perhaps twice.
        whole
            The job is the one that the whole request names, whatever the store has of it.
        """
        check_seconds("timeout", timeout)
        found = await self.access.find(request, ran=False)
        job: dict[str, Any] = {}
        began = time.monotonic()
        for attempt in range(_ATTEMPTS):
            if found.complete:
                break
            await asyncio.gather(*(self.access.put_array(digest, a) for digest, a in request.arrays.items()))
            document = request.document(request.whole if whole else found.missing)
            listening: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
            if tell is not None and found.generation is not None:
                tell(Delta(0, found.generation["token_ids"], found.generation["text"] or "", 0))
            elif tell is not None:
                listening = self.feed.listening(request.card.id, job_id(document), tell)
            async with listening:
                ticket = self.queue.submit(request.card.id, document, terms, fresh=attempt > 0)
                job = await answer_of(ticket, timeout, terms.queue_timeout)
            found = await self.access.find(request, ran=True)
        if not found.complete:
            raise CacheError(f"the rows of {request.run} were computed {_ATTEMPTS} times, and are not in the store")
        return result_of(request, result, found, self.tokenizer, job, time.monotonic() - began)


def result_of(
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
        "reuse": request.reuse,
        "prefix_rows": None if found.lent is None else sum(found.lent.values()),
        "prefix_keys": None if found.lent is None else sorted(found.lent),
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
        "strings": tokenizer.tokens if tokenizer else None,
    }
    made: dict[str, Any] | None = found.generation
    generated: list[int] = made["token_ids"] if made is not None else []
    ids = [*request.tokens, *generated]
    rest |= {"token_ids": ids} if made is None else {"generation": made, "prompt": request.tokens}
    return result(request.card, tokens=tokenizer.tokens(ids) if tokenizer else None, **rest)
