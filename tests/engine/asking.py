"""Short ways to ask an engine, and to compare what it says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lenspool_cache import Run, Store
from lenspool_cache.ranges import OpenRange
from lenspool_worker.engine import Engine
from lenspool_worker.requests import CaptureGroup, EngineRequest, EngineResult

_numbers = itertools.count()
Rows = dict[str, np.ndarray]
Prompts = Callable[[list[int]], list[list[int]]]
"""Prompts of given lengths, as token ids."""


class Asker:
    """An engine and its store; each question is a run of its own, so nothing is ever reused."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self.engine = engine
        self.store = store
        self.hooks = [hook["name"] for hook in engine.hooks]

    def request(
        self,
        tokens: Sequence[int],
        hooks: Iterable[str] = (),
        ranges: Sequence[OpenRange] | None = None,
        edits: Sequence[Mapping[str, Any]] = (),
        generate: int | None = None,
        **sampling: Any,
    ) -> EngineRequest:
        """A request; `ranges` None is every position."""
        number = next(_numbers)
        if ranges is None:
            ranges = [(0, None if generate else len(tokens))]
        names = tuple(hooks)
        greedy = {"max_tokens": generate, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": None}
        return EngineRequest(
            job_id=f"job-{number}",
            tokens=list(tokens),
            captures=(CaptureGroup(names, tuple(ranges)),) if names else (),
            interventions=[dict(edit) for edit in edits],
            sampling={**greedy, "stop": [], "ignore_eos": True, **sampling} if generate else None,
            run=Run({"test": number}),
        )

    def rows(self, request: EngineRequest, length: int | None = None) -> dict[str, np.ndarray]:
        """What the store has of a request, `length` closing the open ranges."""
        out = {}
        for group in request.captures:
            ranges = [(a, length if b is None else b) for a, b in group.ranges]
            for name in group.hooks:
                out[name] = self.store.rows(request.run, name, ranges)  # type: ignore[arg-type]
        return out

    async def capture(self, tokens: Sequence[int], hooks: Iterable[str], **options: Any) -> dict[str, np.ndarray]:
        """Rows of a prompt."""
        request = self.request(tokens, hooks, **options)
        result = await self.engine.run(request)
        rows = self.rows(request)
        assert result.computed_rows == sum(map(len, rows.values()))
        return rows

    async def generate(
        self, tokens: Sequence[int], count: int, hooks: Iterable[str] = (), **options: Any
    ) -> tuple[EngineResult, dict[str, np.ndarray]]:
        """A generation, and its rows; the last token has none."""
        request = self.request(tokens, hooks, generate=count, **options)
        result = await self.engine.run(request)
        rows = self.rows(request, len(tokens) + len(result.token_ids) - 1)
        assert result.computed_rows == sum(map(len, rows.values()))
        return result, rows

    async def settled(self) -> dict[str, Any]:
        """Counters once nothing is held any more."""
        for _ in range(100):
            stats = await self.engine.stats()
            if stats["live"] == stats["held_bytes"] == stats["tracked"] == 0:
                return stats
            await asyncio.sleep(0.05)
        raise AssertionError(f"something is still held: {stats}")


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance; refuses what is not finite or of another shape."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert np.isfinite(got).all() and np.isfinite(expected).all()
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def worst(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative distance of any hook, and which; the norms must agree as well."""
    assert got
    found = []
    for name, rows in got.items():
        if not expected[name].any():  # an edit has made it zero
            assert rows.shape == expected[name].shape and not rows.any(), name
            found.append((0.0, name))
            continue
        ratio = float(np.linalg.norm(rows) / np.linalg.norm(expected[name]))
        assert abs(ratio - 1) < 1e-4, f"{name} is {ratio} times as large"
        found.append((relative(rows, expected[name]), name))
    return max(found)
