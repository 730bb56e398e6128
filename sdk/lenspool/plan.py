"""What a set of captures would cost, told from the store before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from lenspool.access import Access, RedisAccess
from lenspool.job import Request, closed, job_id
from lenspool.sizes import job_bytes
from lenspool_cache import Run
from lenspool_cache import ranges as rg
from lenspool_cache.prefix import BLOCK, reach
from lenspool_cache.ranges import Range


@dataclass(frozen=True)
class Plan:
    """What captures of some prompts would take.

    Attributes
    ----------
    prompts
        How many.
    hits
        Those that the store can answer; None where the client does not reach the store.
    repeats
        Those that ask for the same as earlier ones, or for rows of a prefix that these will have left, and are answered
        with them.
    misses
        Those that would run: wholly, or for the rows that are missing; None where the client does not reach the store.
    tokens
        Prompt tokens that would be computed; at most so many, where the store is not reached. Of one that begins as
        an earlier one of the plan does, those are left out that stand in their common blocks of 16 tokens and before
        the first row that is missing. What the engine may still know of prompts before the plan is not counted on.
    bytes
        Bytes of the rows that would be computed, in the model's dtype; likewise, without rows of such common blocks.
        Rows that a readout is computed from are counted: they are held until its job ends.
    seconds
        What the tokens take at the rate that the pool's workers have lately run at when they worked (`None` before they
        have), with nobody else in it. An estimate: the rate was that of other prompts and hooks.
    """

    prompts: int
    hits: int | None
    repeats: int
    misses: int | None
    tokens: int
    bytes: int
    seconds: float | None = None

    def __repr__(self) -> str:
        cost = f"{self.tokens} tokens, {_readable(self.bytes)}"
        if self.seconds is not None and self.tokens:
            cost += f", about {_duration(self.seconds)}"
        if self.hits is None:
            unknown = "this client does not reach the store, so hits are not known"
            return f"<Plan of {self.prompts} prompts: at most {cost}; {unknown}>"
        repeats = f", {self.repeats} repeats" if self.repeats else ""
        return f"<Plan of {self.prompts} prompts: {self.hits} hits{repeats}, {self.misses} to run: {cost}>"


class Tally:
    """Adds requests up."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._seen: set[bytes] = set()
        self._ahead = _Ahead()
        self._prompts = self._hits = self._repeats = self._misses = self._tokens = self._bytes = 0

    async def add(self, request: Request) -> None:
        """Look one request up."""
        found = await self._access.find(request, ran=False)
        self._prompts += 1
        if found.complete:
            self._hits += 1
            return
        document = request.document(found.missing)
        identity = bytes.fromhex(job_id(document))
        if identity in self._seen:
            self._repeats += 1
            return
        self._seen.add(identity)
        run, length = request.run, len(request.tokens)
        left = self._ahead.left(run, {name: closed(ranges, length) for name, ranges in found.missing.items()})
        if not left:
            self._repeats += 1
            return
        self._misses += 1
        self._tokens += length - self._ahead.known(run, left)
        self._bytes += sum(job_bytes(request.document(left)["captures"], request.card, length).values())
        self._ahead.add(run, {name: closed(request.ranges_of(name), length) for name in request.hooks})

    def plan(self, rate: float | None) -> Plan:
        """All so far; `rate` is in tokens per second."""
        known = not isinstance(self._access, RedisAccess)
        return Plan(
            prompts=self._prompts,
            hits=self._hits if known else None,
            repeats=self._repeats,
            misses=self._misses if known else None,
            tokens=self._tokens,
            bytes=self._bytes,
            seconds=None if rate is None else self._tokens / rate,
        )


class _Ahead:
    """What the prompts of a plan will have computed and stored when a later one of it comes, to the block."""

    def __init__(self) -> None:
        self._names: dict[bytes, set[str]] = {}  # of each block that is computed, entries with all of its rows

    def _shared(self, run: Run) -> int:
        """Number of leading blocks that earlier prompts compute."""
        return sum(1 for _ in takewhile(self._names.__contains__, run.blocks))

    def left(self, run: Run, missing: Mapping[str, Sequence[Range]]) -> dict[str, list[Range]]:
        """What is missing still."""
        shared = self._shared(run)
        out: dict[str, list[Range]] = {}
        for name, ranges in missing.items():
            ahead = reach(name)
            blocks = range(shared if ahead is not None else 0)
            stop = BLOCK * shared - (ahead or 0)
            there = [(BLOCK * i, min(BLOCK * (i + 1), stop)) for i in blocks if name in self._names[run.blocks[i]]]
            if gap := rg.subtract(ranges, there):
                out[name] = gap
        return out

    def known(self, run: Run, left: Mapping[str, Sequence[Range]]) -> int:
        """Leading tokens whose keys and values the engine has, and of which no row is to be computed."""
        first = min(0 if reach(name) is None else ranges[0][0] for name, ranges in left.items())
        return min(first, BLOCK * self._shared(run))

    def add(self, run: Run, wanted: Mapping[str, Sequence[Range]]) -> None:
        """Count on a prompt, of which these rows will be stored."""
        lent = {name: ranges for name, ranges in wanted.items() if reach(name) is not None}
        for i, block in enumerate(run.blocks):
            whole = [(BLOCK * i, BLOCK * (i + 1))]
            names = (name for name, ranges in lent.items() if not rg.subtract(whole, ranges))
            self._names.setdefault(block, set()).update(names)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
