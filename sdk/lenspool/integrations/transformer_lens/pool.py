"""A pool for synchronous callers, wherever they are: its client runs on an event loop in a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from lenspool.client import Client
from lenspool.loop_thread import LoopThread

T = TypeVar("T")


class Pool:
    """A client, opened until `close`.

    Parameters
    ----------
    opened
        What opens and closes it: an unopened client, or a pool that starts with it.
    """

    def __init__(self, opened: contextlib.AbstractAsyncContextManager[Client]) -> None:
        self._opened = opened
        self._loop = LoopThread(anywhere=True)
        self._client: Client | None = None
        try:
            self._client = self._loop.run(self._enter())
        except BaseException:
            self._loop.close()
            raise

    async def _enter(self) -> Client:
        return await self._opened.__aenter__()

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Call an async function of the client.

        Raises
        ------
        RuntimeError
            It was closed.
        """
        client = self._client
        if client is None:
            raise RuntimeError("the bridge was closed")

        async def call() -> T:
            return await work(client)

        return self._loop.run(call())

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._client is None

    def close(self) -> None:
        """Close the client, and stop a pool of its own; again: nothing."""
        if self._client is None:
            return
        self._client = None

        async def leave() -> Any:
            return await self._opened.__aexit__(None, None, None)

        try:
            self._loop.run(leave())
        finally:
            self._loop.close()
