"""An event loop in a thread of its own, for callers without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from lenspool.progress import in_notebook

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in its thread while the caller waits.

    Parameters
    ----------
    anywhere
        Whether the caller may itself be inside a running loop, which then stands still: so that a synchronous interface
        can be used in a notebook. Otherwise such a call is refused.
    """

    def __init__(self, *, anywhere: bool = False) -> None:
        self._anywhere = anywhere
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lenspool", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; an interrupt of the waiting cancels it.

        Raises
        ------
        RuntimeError
            The caller is inside a running loop, and may not be; or this was closed.
        """
        if self.closed:
            work.close()
            raise RuntimeError("the client was closed")
        if not self._anywhere and _in_a_loop():
            work.close()
            raise RuntimeError(
                "lenspool.sync was called inside a running event loop, which it would block: use lenspool.Client "
                "(or lenspool.connect_local) and await, or call it in a thread: await asyncio.to_thread(...)"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, begin: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Walk through what an async iterator yields; `begin` makes it, in the loop."""

        async def step(items: AsyncIterator[T] | None) -> tuple[AsyncIterator[T], list[T]]:
            items = begin() if items is None else items
            try:
                return items, [await anext(items)]
            except StopAsyncIteration:
                return items, []

        items: AsyncIterator[T] | None = None
        try:
            while True:
                items, found = self.run(step(items))
                if not found:
                    return
                yield found[0]
        finally:
            if items is not None:
                self.run(items.aclose())  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the loop and its thread; harmless when that is done."""
        if self.closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _in_a_loop() -> bool:
    """Whether an event loop runs here. That of a notebook does not count: its cells may block it, and always do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return not in_notebook()
