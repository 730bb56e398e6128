"""What a worker does with one job document: reuse what the store has, run what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import redis.asyncio

from lenspool import entries, keys
from lenspool.access import parse_generation
from lenspool.card import ModelCard
from lenspool.checks import check
from lenspool.edit_forms import array_of
from lenspool.errors import CacheError, InvalidJob
from lenspool.job import GENERATION, closed, run_of
from lenspool.sizes import job_bytes
from lenspool_cache import Run, Store, inline
from lenspool_cache import ranges as rg
from lenspool_cache.codec import dtype_of
from lenspool_cache.keys import array_digest
from lenspool_cache.prefix import reach
from lenspool_cache.ranges import OpenRange
from lenspool_worker.engine import Engine
from lenspool_worker.prefixes import Missing, Prefixes
from lenspool_worker.requests import CaptureGroup, EngineRequest
from lenspool_worker.room import Room
from lenspool_worker.token_streams import TokenStreams

BLOB_TTL = 300
"""Seconds for which rows wait in Redis for a client without access to the store."""

Wanted = dict[str, list[OpenRange]]
_FAR = 2**62


class JobRunner:
    """Runs job documents on an engine; the handler of the pool worker.

    Parameters
    ----------
    engine, store
        Where rows are computed, and where they go.
    card
        The card that jobs are checked against.
    connection
        Redis, for arrays and rows of clients that cannot reach the store.
    streams
        Where tokens go that somebody waits for.
    room
        For the rows of jobs in flight; a job's wait for it counts as its run.

    Attributes
    ----------
    rows
        `computed_rows` and `reused_rows` of all jobs so far.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        card: ModelCard,
        connection: redis.asyncio.Redis,
        streams: TokenStreams,
        room: Room,
    ) -> None:
        self._engine = engine
        self._store = store
        self._card = card
        self._redis = connection
        self._streams = streams
        self.room = room
        self._prefixes = Prefixes()
        self.rows = {"computed_rows": 0, "reused_rows": 0}
        self._shapes: dict[str, tuple[int, ...]] = {}

    async def __call__(self, document: dict[str, Any], job_id: str) -> dict[str, Any]:
        """Run one job.

        Returns
        -------
        dict
            For a capture or generation the counts of rows, seconds and the worker's name; for a fetch the name of the
            blob in Redis.

        Raises
        ------
        LenspoolError
            The job fails alone.
        """
        check(document, self._card)
        if document["kind"] == "fetch":
            return await self._fetch(document, job_id)
        run = run_of(document, self._card.context)
        await self._arrays(document)
        wanted: Wanted = {
            name: [(start, stop) for start, stop in group["ranges"]]
            for group in document["captures"]
            for name in group["hooks"]
        }
        tokens, sampling = document["tokens"], document["sampling"]
        if sampling is not None:
            generation = await asyncio.to_thread(self._generation, run)
            if generation is not None:
                # Rows that an earlier generation did not ask for: of the very tokens that it generated, in one prefill.
                tokens, sampling = [*tokens, *generation["token_ids"][:-1]], None
        # rows of the prompt may be there; those behind it are known by the generation itself
        known = {name: closed(ranges, len(tokens)) for name, ranges in wanted.items()}
        if sampling is not None:
            known = {name: ranges for name, ranges in known.items() if reach(name) is not None}
        total = sum(map(rg.count, known.values()))

        async def look() -> Missing:
            return await asyncio.to_thread(self._store.missing, run, known)

        missing = await look()
        fresh = "reuse" in document
        if not fresh:
            missing = await self._prefixes.settled(run, missing, look)
        if sampling is None and not missing:
            return self._answer(0, total, 0.0, generated=False)
        there = total - sum(map(rg.count, missing.values()))
        request = EngineRequest(
            job_id=job_id,
            tokens=tokens,
            captures=_groups(missing if sampling is None else _left(wanted, known, missing)),
            interventions=_clipped(document["interventions"], len(tokens))
            if sampling is None
            else document["interventions"],
            sampling=sampling,
            run=run,
            fresh=fresh,
        )
        with self._prefixes.running(run, missing if sampling is None else None):
            async with self.room.take(self._size(request)):
                if sampling is None:
                    result = await self._engine.run(request)
                else:
                    with self._streams.following(job_id) as follower:
                        result = await self._engine.run(request, follower)
        return self._answer(result.computed_rows, there, result.run_s, generated=sampling is not None)

    def _size(self, request: EngineRequest) -> int:
        """Bytes that the worker process holds for a request, at most, until its rows are stored."""
        captures = [{"hooks": group.hooks, "ranges": group.ranges} for group in request.captures]
        return sum(job_bytes(captures, self._card, request.length).values())

    def _answer(self, computed: int, reused: int, run_s: float, *, generated: bool) -> dict[str, Any]:
        self.rows["computed_rows"] += computed
        self.rows["reused_rows"] += reused
        return {
            "v": 1,
            "computed_rows": computed,
            "reused_rows": reused,
            "run_s": round(run_s, 6),
            "generated": generated,
            "worker": self._card.worker,
        }

    def _generation(self, run: Run) -> dict[str, Any] | None:
        segments = self._store.lookup(run, [GENERATION]).get(GENERATION)
        return parse_generation(self._store.read(segments[0])) if segments else None

    async def _arrays(self, document: dict[str, Any]) -> None:
        """See to it that the store has every array that the job names, and that those of readouts fit their hooks."""
        needed = {
            digest: f"interventions[{i}].value"
            for i, item in enumerate(document["interventions"])
            if (digest := array_of(item)) is not None
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name in (name for group in document["captures"] for name in group["hooks"] if entries.is_readout(name)):
            entry = entries.parse(name)
            wanted = entry.shapes(entries.width_read(entry, self._card))
            needed |= {digest: f"{entry.op}.{argument}" for argument, digest in entry.arrays.items()}
            shapes |= {digest: wanted[argument] for argument, digest in entry.arrays.items()}
        for digest, field in needed.items():
            if not self._store.has_array(digest):
                data = await self._redis.get(keys.array(digest))
                if data is None:
                    raise InvalidJob(
                        field, f"the pool does not have the array {digest[:16]}", "send it with Client.put"
                    )
                array = inline.from_bytes(data)["array"]
                if array_digest(array) != digest:
                    raise InvalidJob(field, f"the array sent as {digest[:16]} has other contents")
                await asyncio.to_thread(self._store.put_array, array)
        for digest, shape in shapes.items():
            if digest not in self._shapes:
                array = await asyncio.to_thread(self._store.get_array, digest)
                if array.dtype != np.float32 or not np.isfinite(array).all():
                    raise InvalidJob(needed[digest], f"is {array.dtype}, or not finite", "finite float32 numbers")
                self._shapes[digest] = array.shape
            if self._shapes[digest] != shape:
                raise InvalidJob(needed[digest], f"has shape {self._shapes[digest]}", f"{shape}")

    async def _fetch(self, document: dict[str, Any], job_id: str) -> dict[str, Any]:
        """Leave stored rows in Redis as HDF5 bytes."""
        run = Run(document["run"])
        data = await asyncio.to_thread(self._pack, run, document["names"], document["limit"])
        await self._redis.set(keys.blob(job_id), data, ex=BLOB_TTL)
        return {"v": 1, "blob": job_id, "bytes": len(data)}

    def _pack(self, run: Run, names: dict[str, list[list[int | None]]], limit: int) -> bytes:
        chosen: dict[str, list[rg.Range]] = {}
        size = 0
        for name, ranges in names.items():
            end = _FAR
            if any(stop is None for _, stop in ranges):
                end = max((s.range[1] for s in self._store.lookup(run, [name]).get(name, ())), default=0)
            chosen[name] = rg.close([(r[0], r[1]) for r in ranges if r[0] is not None], end)
            segments = self._store.find(run, {name: chosen[name]}).get(name, [])
            if not segments or rg.subtract(chosen[name], [s.range for s in segments]):
                raise CacheError(f"the store has no rows of {name} for this run any more")
            size += rg.count(chosen[name]) * segments[0].width * dtype_of(segments[0].dtype).itemsize
        if size > limit:
            raise InvalidJob(
                "inline_limit",
                f"the answer has {size} bytes",
                f"at most {limit} through Redis: ask for fewer hooks or positions, raise inline_limit, or give the "
                "client the store's folder",
            )
        return inline.to_bytes({name: self._store.rows(run, name, ranges) for name, ranges in chosen.items()})


def _left(wanted: Wanted, known: Missing, missing: Missing) -> Wanted:
    """What a generation has to capture: all that is wanted, but the rows that are there."""
    out: Wanted = {}
    for name, ranges in wanted.items():
        there = rg.subtract(known.get(name, ()), missing.get(name, ()))
        end = there[-1][1] if there else 0
        behind = [(max(start, end), stop) for start, stop in ranges if stop is None or stop > end]
        left = [*rg.subtract(rg.close(ranges, end), there), *behind]
        if left:
            out[name] = left
    return out


def _groups(wanted: Mapping[str, Sequence[OpenRange]]) -> tuple[CaptureGroup, ...]:
    """Hooks that want the same rows, together."""
    groups: dict[tuple[OpenRange, ...], list[str]] = {}
    for name, ranges in wanted.items():
        groups.setdefault(tuple(ranges), []).append(name)
    return tuple(CaptureGroup(tuple(names), ranges) for ranges, names in groups.items())


def _clipped(interventions: list[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Interventions of a run over known tokens: open ranges end with them, and what begins behind them is left out."""
    out = []
    for item in interventions:
        ranges = rg.close([(start, stop) for start, stop in item["ranges"]], length)
        if ranges:
            out.append({**item, "ranges": [list(r) for r in ranges]})
    return out


def run(document: dict[str, Any]) -> dict[str, Any]:
    """The function that a job names, for a stock `rq worker -S rq.serializers.JSONSerializer`; see `single`."""
    from rq import get_current_job

    from lenspool_worker.single import run_single  # it stands on this module

    job = get_current_job()
    return asyncio.run(run_single(document, job.id if job is not None else "single"))
