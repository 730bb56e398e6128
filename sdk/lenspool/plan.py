"""What a set of captures would cost, told from the store before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from lenspool.access import Access, RedisAccess
from lenspool.job import Request, job_id
from lenspool.sizes import job_bytes


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
        Those that ask for the same as an earlier one, and are answered with it.
    misses
        Those that would run: wholly, or for the rows that are missing; None where the client does not reach the store.
    tokens
        Prompt tokens of those that would run; at most so many, where the store is not reached.
    bytes
        Bytes of the rows that would be computed, in the model's dtype, before the store compresses; likewise. Rows
        that a readout is computed from are counted: they are held until its job ends.
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
        self._misses += 1
        self._tokens += len(request.tokens)
        self._bytes += sum(job_bytes(document["captures"], request.card, len(request.tokens)).values())

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
