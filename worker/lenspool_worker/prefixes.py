"""Jobs in flight whose prompts begin alike: one computes what they share, and the others wait for it.

vLLM's prefix cache serves what is computed, not what is being computed, and the store has rows only when their job has
ended. So jobs that come together would each compute a prefix that they share.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lenspool_cache import Run
from lenspool_cache import ranges as rg
from lenspool_cache.prefix import BLOCK, reach
from lenspool_cache.ranges import Range

Missing = Mapping[str, Sequence[Range]]
"""Entry -> positions that a job has to compute."""

WAIT_S = 60.0
_LEAST, _SHARE = 32, 0.25  # positions that a wait must save, and their share of what is to be computed
_CANDIDATES = 8
_COMPUTED = 8192  # blocks that are remembered: keys and values that the engine probably has


@dataclass(eq=False)
class _Leader:
    """A capture that runs."""

    missing: Missing
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Prefixes:
    """What runs now in one worker, by the blocks of its prompts."""

    def __init__(self) -> None:
        self._running: dict[bytes, set[_Leader]] = {}
        self._computed: OrderedDict[bytes, None] = OrderedDict()

    @contextlib.contextmanager
    def running(self, run: Run, missing: Missing | None) -> Iterator[None]:
        """While a job runs; others wait for it if it says what it computes (a generation would take too long)."""
        leader = _Leader(missing or {})
        blocks = run.blocks if missing is not None else []
        for block in blocks:
            self._running.setdefault(block, set()).add(leader)
        try:
            yield
            for block in run.blocks:
                self._computed[block] = None
                self._computed.move_to_end(block)
            while len(self._computed) > _COMPUTED:
                self._computed.popitem(last=False)
        finally:
            for block in blocks:
                self._running[block].discard(leader)
                if not self._running[block]:
                    del self._running[block]
            leader.ended.set()

    async def settled(self, run: Run, missing: Missing, look: Callable[[], Awaitable[Missing]]) -> Missing:
        """Wait for jobs that compute much of what a job needs; returns what is missing then.

        Nothing else runs between this and a following `running`: of jobs that come together exactly one leads.

        Parameters
        ----------
        look
            Asks the store again for what is missing.
        """
        tried: set[_Leader] = set()
        end = asyncio.get_running_loop().time() + WAIT_S
        while missing and (leader := self._leader(run, missing, tried)) is not None:
            tried.add(leader)
            try:
                async with asyncio.timeout_at(end):
                    await leader.ended.wait()
            except TimeoutError:
                break
            missing = await look()
        return missing

    def _leader(self, run: Run, missing: Missing, tried: set[_Leader]) -> _Leader | None:
        """The job whose end saves most, if that is worth the wait."""
        if any(reach(name) is None for name in missing):
            return None  # needs all from the first position on, whatever others bring
        known = self._known(run)
        begin = min(_first(missing), known)
        length = max(ranges[-1][1] for ranges in missing.values())
        best, saved = None, max(_LEAST - 1, _SHARE * (length - begin))
        for leader, stop in self._alike(run, tried):
            after = min(_first(_without(missing, leader.missing, stop)), max(known, stop))
            if after - begin > saved:
                best, saved = leader, after - begin
        return best

    def _alike(self, run: Run, tried: set[_Leader]) -> Iterator[tuple[_Leader, int]]:
        """Some of the jobs that begin like a run, the most alike first, and how many positions they share with it."""
        seen = set(tried)
        for i in range(len(run.blocks), 0, -1):
            for leader in self._running.get(run.blocks[i - 1], set()) - seen:
                seen.add(leader)
                yield leader, BLOCK * i
                if len(seen) >= len(tried) + _CANDIDATES:
                    return

    def _known(self, run: Run) -> int:
        """Leading positions whose keys and values the engine has computed lately."""
        for i in range(len(run.blocks), 0, -1):
            if run.blocks[i - 1] in self._computed:
                return BLOCK * i
        return 0


def _first(missing: Missing) -> int:
    return min((ranges[0][0] for ranges in missing.values() if ranges), default=2**62)


def _without(missing: Missing, brought: Missing, stop: int) -> Missing:
    """What is missing still when another job, alike up to a position, has stored its rows."""
    out: dict[str, Sequence[Range]] = {}
    for name, ranges in missing.items():
        there = rg.intersect(brought.get(name, ()), [(0, max(0, stop - (reach(name) or 0)))])
        out[name] = rg.subtract(ranges, there)
    return out
