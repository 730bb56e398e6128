"""How a client reaches results: in the store itself, or through Redis when the store is on another machine."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from lenspool import keys
from lenspool.card import ModelCard
from lenspool.job import GENERATION, Request, closed
from lenspool.queue import JobQueue
from lenspool.result import Reader
from lenspool_cache import CacheError, CacheMiss, Run, Store, inline
from lenspool_cache import ranges as rg
from lenspool_cache.ranges import OpenRange, Range


@dataclass
class Found:
    """What is there for a request.

    Attributes
    ----------
    missing
        Hook -> ranges that are not there; empty together with `complete=True`.
    length
        Number of positions that have activations; None for a generation that has not run.
    lent
        Entry keys of runs that begin like this one -> rows of it that belong to them; None where that is not known.
    """

    complete: bool
    missing: dict[str, list[OpenRange]] = field(default_factory=dict)
    length: int | None = None
    generation: dict[str, Any] | None = None
    reader: Reader | None = None
    lent: dict[str, int] | None = None

    def ranges(self, request: Request, name: str | None = None) -> list[Range]:
        """The request's ranges with their end; of one of its names, where that has rows."""
        assert self.length is not None
        return closed(request.ranges if name is None else request.ranges_of(name), self.length)


class Access(Protocol):
    """Where a client looks for results and leaves arrays."""

    @property
    def store(self) -> Store | None:
        """The store, where its files are at hand."""
        ...

    async def find(self, request: Request, *, ran: bool) -> Found:
        """What is there for a request; `ran` says that its job has finished."""
        ...

    async def put_array(self, digest: str, array: np.ndarray) -> None:
        """Leave an array where workers find it by its digest."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


def parse_generation(rows: np.ndarray) -> dict[str, Any]:
    """The generation entry: JSON bytes in a column of uint8."""
    document: dict[str, Any] = json.loads(rows.tobytes())
    return document


class StoreAccess:
    """The client opens the store's files itself (same host or shared directory)."""

    def __init__(self, store: Store, fallback: RedisAccess | None = None) -> None:
        self.store = store
        self._fallback = fallback

    async def find(self, request: Request, *, ran: bool) -> Found:
        return await asyncio.to_thread(self.look, request)

    def look(self, request: Request) -> Found:
        """What the store has of a request."""
        run = request.run
        length, generation = len(request.tokens), None
        if request.sampling is not None:
            made = self.store.lookup(run, [GENERATION])
            if not made:
                return Found(False, {name: request.ranges_of(name) for name in request.hooks})
            generation = parse_generation(self.store.read(made[GENERATION][0]))
            length += len(generation["token_ids"]) - 1
        wanted = {name: closed(request.ranges_of(name), length) for name in request.hooks}
        segments = self.store.find(run, wanted)
        missing: dict[str, list[OpenRange]] = {}
        lent: dict[str, int] = {}
        for name, ranges in wanted.items():
            gap = rg.subtract(ranges, (s.range for s in segments.get(name, ())))
            if gap:
                missing[name] = list(gap)
            own = [s.range for s in segments.get(name, ()) if s.key == run.entry(name)]
            for segment in (s for s in segments.get(name, ()) if s.key != run.entry(name)):
                rows = rg.count(rg.subtract(rg.intersect(ranges, [segment.range]), own))
                own.append(segment.range)
                lent[segment.key.hex()] = lent.get(segment.key.hex(), 0) + rows
        if missing:
            return Found(False, missing, length, generation)
        return Found(True, {}, length, generation, lambda name: self._rows(run, name, wanted[name]), lent)

    def _rows(self, run: Run, name: str, wanted: list[Range]) -> np.ndarray:
        try:
            return self.store.rows(run, name, wanted)
        except CacheMiss as error:
            advice = (
                "evicted since; the same call again computes it anew, and what is pinned stays (lenspool cache pin)"
            )
            raise CacheMiss(name, advice) from error

    async def put_array(self, digest: str, array: np.ndarray) -> None:
        if self.store.read_only and self._fallback is not None:
            await self._fallback.put_array(digest, array)
        else:
            await asyncio.to_thread(self.store.put_array, array)

    def close(self) -> None:
        self.store.close()


class RedisAccess:
    """Results ride through Redis as HDF5 bytes, up to a limit."""

    ARRAY_TTL = 24 * 3600
    store = None

    def __init__(self, queue: JobQueue, limit: int) -> None:
        self._queue = queue
        self._limit = limit

    async def find(self, request: Request, *, ran: bool) -> Found:
        if not ran:
            return Found(False, {name: request.ranges_of(name) for name in request.hooks})
        run, length, generation = request.run, len(request.tokens), None
        if request.sampling is not None:
            column = (await self._fetch(request.card, run.document, {GENERATION: [[0, None]]}))[GENERATION]
            generation = parse_generation(column)
            length += len(generation["token_ids"]) - 1
        wanted = {name: closed(request.ranges_of(name), length) for name in request.hooks}
        names = {name: [list(r) for r in ranges] for name, ranges in wanted.items() if ranges}
        arrays: dict[str, np.ndarray] = {}
        if names:
            arrays = await self._fetch(request.card, run.document, names)
        return Found(True, {}, length, generation, arrays.__getitem__)

    async def _fetch(self, card: ModelCard, run: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, np.ndarray]:
        document = {
            "v": 1,
            "kind": "fetch",
            "model": card.id,
            "run": dict(run),
            "names": dict(names),
            "limit": self._limit,
            "nonce": uuid.uuid4().hex,
        }
        answer = await self._queue.submit(card.id, document).result()
        data = await self._queue.redis.getdel(keys.blob(answer["blob"]))
        if data is None:
            raise CacheError("the rows expired in Redis before they were read")
        return inline.from_bytes(data)

    async def put_array(self, digest: str, array: np.ndarray) -> None:
        await self._queue.redis.set(keys.array(digest), inline.to_bytes({"array": array}), ex=self.ARRAY_TTL)

    def close(self) -> None:
        return None


def open_access(queue: JobQueue, card: ModelCard, folder: str | Path | Literal[False] | None, limit: int) -> Access:
    """Choose the way to the results of a model.

    The store's folder is the one given, else the one that the worker names, if it exists here and is the same store;
    with `False` no folder is tried.

    Raises
    ------
    CacheError
        A folder was given, and it is not the store that the worker writes to.
    """
    through_redis = RedisAccess(queue, limit)
    if folder is False:
        return through_redis
    path = Path(folder) if folder is not None else Path(card.store_path)
    if folder is None and not (card.store_path and (path / "store.json").is_file()):
        return through_redis
    try:
        store = Store(path, read_only=not os.access(path, os.W_OK))
    except CacheError:
        if folder is not None:
            raise
        return through_redis
    if store.id == card.store_id:
        return StoreAccess(store, through_redis)
    store.close()
    if folder is not None:
        raise CacheError(f"{folder} is another store than the one that {card.name}'s worker writes to")
    return through_redis
