"""Many calls at once: a bounded number in flight, their results in order or as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")

_REDRAW_S = 0.2


async def in_flight(
    items: Iterable[ItemT],
    call: Callable[[ItemT], Awaitable[Any]],
    *,
    concurrency: int,
    ordered: bool = True,
    return_exceptions: bool = False,
) -> AsyncGenerator[tuple[int, Any]]:
    """Call a function for each item, at most `concurrency` at a time.

    Items are drawn as results are taken: there are never more than `concurrency` calls and untaken results together.

    Yields
    ------
    tuple
        Index of the item, and its result; with `return_exceptions` its error in place of that. Otherwise the first
        error is raised, and the other calls are cancelled, as they are when the iterator is closed.
    """
    source = enumerate(items)
    running: dict[asyncio.Task[Any], int] = {}

    async def run(item: ItemT) -> Any:
        return await call(item)

    try:
        while True:
            while len(running) < concurrency and (drawn := next(source, None)) is not None:
                running[asyncio.create_task(run(drawn[1]))] = drawn[0]
            if not running:
                return
            first = next(iter(running))
            if ordered:
                await asyncio.wait([first])
            else:
                first = next(iter((await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]))
            index, error = running.pop(first), first.exception()
            if error is not None and not return_exceptions:
                raise error
            yield index, error if error is not None else first.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@contextlib.contextmanager
def progress_bar(show: bool, items: Iterable[Any], what: str) -> Iterator[Callable[[], None]]:
    """A function to call once for each item that is done; it draws a bar where someone sees it.

    That is a terminal or a notebook; elsewhere, and without `show`, nothing is drawn. Redrawn five times a second at
    most.
    """
    if not show:
        yield lambda: None
        return
    from rich.console import Console  # not needed by a script that shows nothing
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield lambda: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    began = drawn = time.monotonic()
    done = 0
    total = len(items) if isinstance(items, Sized) else None
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total, rate="")

        def draw(now: float) -> None:
            bar.update(task, completed=done, rate=f"{done / max(now - began, 1e-9):.1f}/s")
            bar.refresh()

        def advance() -> None:
            nonlocal done, drawn
            done += 1
            if (now := time.monotonic()) - drawn >= _REDRAW_S:
                drawn = now
                draw(now)

        try:
            yield advance
        finally:
            draw(time.monotonic())
