"""Many runs at once: what every recipe does with its prompts and edits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lenspool.interventions import Intervention
from lenspool.many import in_flight
from lenspool.progress import progress_bar
from lenspool.recipes.metrics import Measure
from lenspool.sampling import check_integer

if TYPE_CHECKING:
    from lenspool.client import Client

CONCURRENCY = 1024
"""Runs that a recipe has in the pool at a time, unless it is told otherwise."""


@dataclass(frozen=True)
class Planned:
    """One run of a recipe, and what is measured of it."""

    measure: Measure
    tokens: list[int]
    interventions: Sequence[Intervention] = ()


async def measured(
    client: Client, runs: Sequence[Planned], *, concurrency: int, progress: bool | None, title: str
) -> tuple[np.ndarray, int]:
    """Run all of them, at most `concurrency` at a time; the first error cancels the rest.

    Returns
    -------
    values
        float64 `[runs]`.
    computed
        How many were not in the store.
    """
    check_integer("concurrency", concurrency, 1, None)
    values, computed = np.full(len(runs), np.nan), 0

    async def run(planned: Planned) -> tuple[float, bool]:
        result = await client.capture(
            planned.tokens, planned.measure.reads, positions="last", interventions=planned.interventions
        )
        return await asyncio.to_thread(planned.measure.value, result), result.cached

    with progress_bar(progress is not False, runs, title) as advance:
        async with aclosing(in_flight(runs, run, concurrency=concurrency, ordered=False)) as pairs:
            async for i, (value, cached) in pairs:
                values[i] = value
                computed += not cached
                advance()
    return values, computed
