"""Tokens of a generation as they are made: `async for delta in client.stream(prompt)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from lenspool.generation import Generation


@dataclass(frozen=True)
class Delta:
    """A piece of a generation.

    Attributes
    ----------
    index
        Number of generated tokens in front of it.
    token_ids
        Its tokens.
    text
        Its text. Tokens and text do not end together: text that may become a stop string, or half a character, is held
        back until that is decided. Empty for a model without a tokenizer.
    offset
        Number of characters in front of the text.
    """

    index: int
    token_ids: list[int]
    text: str
    offset: int


Tell = Callable[[Delta], None]


class TokenStream:
    """A generation that is read while it is made; iterate it once.

    The job is the one that `Client.generate` would send: who streams it and who awaits it share one run. Leaving the
    loop, or `aclose`, gives the job up; it is cancelled when nobody else waits for it.

    Each token is yielded once, in order, also when a lost worker's job runs again elsewhere. A second run may differ
    from the first in low bits, and so from some token on (without a seed it is another sample): then nothing more is
    yielded, `exact` is False, and `result` is the generation that counts.

    Attributes
    ----------
    token_ids, text
        What has been yielded so far.
    exact
        Whether that is the generation, or its beginning. False when a repeated run has turned out differently.

    Examples
    --------
    >>> async with client.stream("Once upon a time", max_tokens=100) as stream:  # doctest: +SKIP
    ...     async for delta in stream:
    ...         print(delta.text, end="", flush=True)
    >>> stream.result.finish_reason  # doctest: +SKIP
    'length'
    """

    def __init__(self, answer: Callable[[Tell], Coroutine[Any, Any, Generation]]) -> None:
        self._answer = answer
        self._begun = False
        self._task: asyncio.Task[Generation] | None = None
        self._result: Generation | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self.exact = True

    @property
    def result(self) -> Generation:
        """The whole generation, with its activations; there once the loop has ended by itself.

        Raises
        ------
        RuntimeError
            It has not.
        """
        if self._result is None:
            raise RuntimeError("the stream has not been read to its end")
        return self._result

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Begin; an error of the call is raised by the first step, as `Client.generate` raises it."""
        if self._begun:
            raise RuntimeError("a stream can be iterated once")
        self._begun = True
        return self._deltas()  # not kept here: a loop that is left drops it, which ends it

    async def _deltas(self) -> AsyncIterator[Delta]:
        heard: asyncio.Queue[Delta | None] = asyncio.Queue()
        task = self._task = asyncio.create_task(self._answer(heard.put_nowait))
        task.add_done_callback(lambda _: heard.put_nowait(None))
        try:
            while (delta := await heard.get()) is not None:
                if (new := self._new(delta)) is not None:
                    yield new
            generation = await task
            text = generation.text or ""
            if generation.token_ids[: len(self.token_ids)] != self.token_ids or not text.startswith(self.text):
                self.exact = False
            if (new := self._new(Delta(0, generation.token_ids, text, 0))) is not None:
                yield new
            self._result = generation
        finally:
            await self.aclose()

    def _new(self, delta: Delta) -> Delta | None:
        """The part of a delta that has not been yielded; None when that is nothing, or does not follow."""
        count, chars = len(self.token_ids), len(self.text)
        if not self.exact or delta.index > count or delta.offset > chars:
            return None  # what lies between comes with the result
        again = self.token_ids[delta.index : delta.index + len(delta.token_ids)]
        if delta.token_ids[: len(again)] != again:
            self.exact = False
            return None
        new = Delta(count, delta.token_ids[count - delta.index :], delta.text[chars - delta.offset :], chars)
        if not new.token_ids and not new.text:
            return None
        self.token_ids += new.token_ids
        self.text += new.text
        return new

    async def aclose(self) -> None:
        """Give the job up, if it still runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
