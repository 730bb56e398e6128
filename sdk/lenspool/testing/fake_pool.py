"""A pool that has every answer at once: the client is the real one, the numbers are made up."""

from __future__ import annotations

import hashlib
from typing import Any, Self

import numpy as np

from lenspool.access import Found
from lenspool.answer import Desk
from lenspool.arguments import Manner
from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.errors import InvalidJob, PoolUnavailable
from lenspool.handle import Job
from lenspool.job import Request, closed
from lenspool.testing.fake_model import byte_tokenizer, fake_card
from lenspool.testing.fake_rows import fake_rows
from lenspool_cache import ranges as rg


class FakePool:
    """For unit tests of code that calls lenspool: no Redis, no engine, no files.

    Calls are checked, tokenized and answered as by a real pool, with arrays of the right shapes and dtypes. The numbers
    are random ones that follow from the request: equal calls have equal answers, an intervention changes them, and they
    mean nothing. A generation has `max_tokens` letters, whatever else the sampling says. There is no queue: `submit_*`
    and `status` raise `PoolUnavailable`; log-probabilities of generated tokens are refused.

    Parameters
    ----------
    card
        Of the model; default `fake_card()`. `ModelCard.from_dict(json)` takes that of a real one.

    Attributes
    ----------
    requests
        What the clients have asked, in order.
    arrays
        What they have left by value: digest -> array.
    """

    def __init__(self, card: ModelCard | None = None) -> None:
        self.card = card or fake_card()
        self.requests: list[Request] = []
        self.arrays: dict[str, np.ndarray] = {}

    def client(self) -> Client:
        """A new client of this pool; `async with` is not needed."""
        return _FakeClient(self)

    async def find(self, request: Request, *, ran: bool) -> Found:
        """See `lenspool.access.Access`."""
        self.requests.append(request)
        length, generation = len(request.tokens), None
        run = request.run.entry("").hex()
        if request.sampling is not None:
            generation = _generation(request, run)
            length += len(generation["token_ids"]) - 1

        def reader(name: str) -> np.ndarray:
            positions = rg.positions(closed(request.ranges_of(name), length))
            return fake_rows(request.card, run, name, positions, length)

        return Found(True, {}, length, generation, reader)

    async def put_array(self, digest: str, array: np.ndarray) -> None:
        """See `lenspool.access.Access`."""
        self.arrays[digest] = array

    def close(self) -> None:
        """See `lenspool.access.Access`."""


class _FakeClient(Client):
    def __init__(self, pool: FakePool) -> None:
        super().__init__("redis://fake.invalid", store=False, patience=0.0)
        self._pool = pool
        self._shared.ready = pool.card, Desk(self._queue, self._feed, pool, byte_tokenizer())

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


def _generation(request: Request, run: str) -> dict[str, Any]:
    """Letters of as many tokens as may be generated."""
    assert request.sampling is not None
    if told := {"logprobs", "prompt_logprobs"} & request.sampling.keys():
        raise InvalidJob(min(told), "a fake pool has no log-probabilities", "None; or readouts")
    seed = int.from_bytes(hashlib.sha256(run.encode()).digest()[:8], "big")
    tokenizer = byte_tokenizer()
    letters = "".join(map(chr, np.random.default_rng(seed).integers(97, 123, request.sampling["max_tokens"])))
    return {"token_ids": tokenizer.encode(letters), "text": letters, "finish_reason": "length"}
