"""A pool that has every answer at once: the client is the real one, the numbers are made up."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from lenspool import sync
from lenspool.access import Found
from lenspool.answer import Desk
from lenspool.arguments import Manner
from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.errors import InvalidJob, PoolUnavailable
from lenspool.handle import Job
from lenspool.job import Request, closed
from lenspool.loop_thread import LoopThread
from lenspool.result import Reader
from lenspool.testing.fake_model import byte_tokenizer, fake_card
from lenspool.testing.fake_rows import fake_rows
from lenspool.tokenizer import Tokenizer
from lenspool_cache import Store
from lenspool_cache import ranges as rg


class FakePool:
    """For unit tests of code that calls lenspool: no Redis, no engine, and without `store` no files.

    Calls are checked, tokenized and answered as by a real pool, with arrays of the right shapes and dtypes. The numbers
    are random ones that follow from the request: equal calls have equal answers, an intervention changes them, and they
    mean nothing. A generation has `max_tokens` letters, whatever else the sampling says. There is no queue: `submit_*`
    and `status` raise `PoolUnavailable`; log-probabilities of generated tokens are refused.

    Parameters
    ----------
    card
        Of the model; default `fake_card()`. `ModelCard.from_dict(json)` takes that of a real one.
    store
        Folder of a real store in which answers are kept and looked for, made if need be: what datasets refer to.
    tokenizer
        Its tokenizer; default a token for each byte. `lenspool.tokenizer.from_bytes` reads a real one.

    Attributes
    ----------
    requests
        What the clients have asked, in order.
    arrays
        What they have left by value: digest -> array.
    """

    def __init__(
        self,
        card: ModelCard | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        store: str | Path | None = None,
    ) -> None:
        self.store = Store(store) if store is not None else None
        self.card = card or fake_card()
        self.tokenizer = tokenizer or byte_tokenizer()
        if self.store is not None:
            self.card = replace(self.card, store_id=self.store.id, store_path=str(self.store.path))
        self.requests: list[Request] = []
        self.arrays: dict[str, np.ndarray] = {}

    def client(self) -> Client:
        """A new client of this pool; `async with` is not needed."""
        return _FakeClient(self)

    def sync_client(self) -> sync.Client:
        """A new client without asyncio."""
        return sync.Client._of(LoopThread(), self.client())

    async def find(self, request: Request, *, ran: bool) -> Found:
        """See `lenspool.access.Access`."""
        self.requests.append(request)
        length, generation = len(request.tokens), None
        run = request.run.entry("").hex()
        if request.sampling is not None:
            generation = _generation(request, run, self.tokenizer)
            length += len(generation["token_ids"]) - 1

        def reader(name: str) -> np.ndarray:
            positions = rg.positions(closed(request.ranges_of(name), length))
            return fake_rows(request.card, run, name, positions, length)

        if self.store is None or generation is not None:
            return Found(True, {}, length, generation, reader)
        return await asyncio.to_thread(self._kept, self.store, request, reader)

    @staticmethod
    def _kept(store: Store, request: Request, reader: Reader) -> Found:
        """The same from the store, where it is put first."""
        run, length = request.run, len(request.tokens)
        wanted = {name: closed(request.ranges_of(name), length) for name in request.hooks}
        covered = store.covered(run, request.hooks)
        missing = {name for name, ranges in wanted.items() if rg.subtract(ranges, covered.get(name, []))}
        store.put(run, {name: _pieces(wanted[name], reader(name)) for name in missing})
        return Found(True, {}, length, None, lambda name: store.rows(run, name, wanted[name]))

    async def put_array(self, digest: str, array: np.ndarray) -> None:
        """See `lenspool.access.Access`."""
        self.arrays[digest] = array

    def close(self) -> None:
        """See `lenspool.access.Access`."""
        if self.store is not None:
            self.store.close()


class _FakeClient(Client):
    def __init__(self, pool: FakePool) -> None:
        super().__init__("redis://fake.invalid", store=False, patience=0.0)
        self._pool = pool
        self._shared.card = pool.card
        self._shared.ready = pool.card, Desk(self._queue, self._feed, pool, pool.tokenizer)

    def twin(self) -> Self:
        return type(self)(self._pool)

    async def _open(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def models(self) -> list[ModelCard]:
        return [self._pool.card]

    async def status(self) -> list[dict[str, Any]]:
        raise PoolUnavailable("a fake pool has no queue")

    async def _rate(self) -> None:
        return None

    async def _submit(self, request: Request, how: Manner) -> Job[Any]:
        raise PoolUnavailable("a fake pool has no queue")


def _pieces(ranges: list[rg.Range], rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Rows of all ranges as pairs of a start and the rows from there."""
    out, at = [], 0
    for start, stop in ranges:
        out.append((start, rows[at : at + stop - start]))
        at += stop - start
    return out


def _generation(request: Request, run: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Letters of as many tokens as may be generated."""
    assert request.sampling is not None
    if told := {"logprobs", "prompt_logprobs"} & request.sampling.keys():
        raise InvalidJob(min(told), "a fake pool has no log-probabilities", "None; or readouts")
    seed = int.from_bytes(hashlib.sha256(run.encode()).digest()[:8], "big")
    letters = "".join(map(chr, np.random.default_rng(seed).integers(97, 123, request.sampling["max_tokens"])))
    return {
        "token_ids": [tokenizer.encode(letter)[-1] for letter in letters],
        "text": letters,
        "finish_reason": "length",
    }
