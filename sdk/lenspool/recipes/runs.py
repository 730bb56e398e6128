"""Many runs at once: what every recipe does with its prompts and edits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lenspool.errors import InvalidJob
from lenspool.interventions import Intervention
from lenspool.recipes.metrics import Measure

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
    if type(concurrency) is not int or concurrency < 1:
        raise InvalidJob("concurrency", f"got {concurrency!r}", "an int from 1")
    gate = asyncio.Semaphore(concurrency)
    values, computed = np.full(len(runs), np.nan), 0

    async def run(i: int, advance: Callable[[], None]) -> bool:
        planned = runs[i]
        async with gate:
            result = await client.capture(
                planned.tokens, planned.measure.reads, positions="last", interventions=planned.interventions
            )
            values[i] = await asyncio.to_thread(planned.measure.value, result)
        advance()
        return result.cached

    with _bar(title, len(runs), progress) as advance:
        tasks = [asyncio.create_task(run(i, advance)) for i in range(len(runs))]
        try:
            for done in asyncio.as_completed(tasks):
                computed += not await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return values, computed


@contextmanager
def _bar(title: str, total: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; None shows it on a terminal and in a notebook."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if shown is None:
        shown = console.is_terminal or console.is_jupyter
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
