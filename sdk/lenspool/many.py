"""Many calls at once: a bounded number in flight, their results in order or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from lenspool.errors import InvalidJob

ItemT = TypeVar("ItemT")


def check_prompts(prompts: Any) -> None:
    """Refuse one text in place of several: its letters would be the prompts.

    Raises
    ------
    InvalidJob
        It is text.
    """
    if isinstance(prompts, (str, bytes)):
        raise InvalidJob("prompts", "is one text", "an iterable of prompts; Client.capture takes one")


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
