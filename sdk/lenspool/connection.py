"""A connection to a pool: who serves what, and the way to the store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from lenspool import keys
from lenspool.access import open_access
from lenspool.answer import Desk
from lenspool.card import HookInfo, ModelCard
from lenspool.config import settings
from lenspool.counts import job_counts
from lenspool.errors import InvalidJob, UnknownModel
from lenspool.interventions import ArrayRef, as_float32
from lenspool.link import without_password
from lenspool.orders import Orders
from lenspool.queue import JobQueue
from lenspool.token_feed import TokenFeed
from lenspool.tokenizer import from_bytes
from lenspool_cache.keys import array_digest

_CLOCKS_S = 600.0
"""How far the clocks of workers and clients may differ: whether a worker lives is said by its card, which expires."""


DEFAULT_URL = "redis://localhost:6379"
_INLINE_LIMIT = 16 * 2**20
_PATIENCE_S = 120.0


@dataclass
class _Shared:
    """What a client and its views (`with_options`) find out together."""

    card: ModelCard | None = None
    ready: tuple[ModelCard, Desk] | None = None
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    open: bool = False
    closed: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class Connection:
    """A connection to a pool; `lenspool.Client`, which has its arguments, is one that asks."""

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        store: str | Path | Literal[False] | None = None,
        inline_limit: int | None = None,
        patience: float | None = None,
    ) -> None:
        outside = settings()
        found = outside.values
        self.url: str = url or found.get("redis", DEFAULT_URL)
        self.model: str | None = model or found.get("model")
        self._store = found.get("store") if store is None else store
        self._inline_limit = found.get("inline_limit", _INLINE_LIMIT) if inline_limit is None else inline_limit
        self._options = outside.options
        self._queue = JobQueue(self.url, patience=found.get("patience", _PATIENCE_S) if patience is None else patience)
        self._orders = Orders(self._queue)
        self._feed = TokenFeed(self._queue, self.url)
        self._shared = _Shared()

    def twin(self) -> Self:
        """Another connection with the same settings, not opened: for another event loop."""
        return type(self)(
            self.url,
            model=self.model,
            store=self._store,
            inline_limit=self._inline_limit,
            patience=self._queue.patience,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lstrip('_')} of {without_password(self.url)}, model {self.model or '(the one)'}>"

    async def __aenter__(self) -> Self:
        self._shared.closed = False
        await self._open()
        return self

    async def _open(self) -> None:
        """Connect, once: by `async with`, or by the first call where nobody did (a notebook)."""
        async with self._shared.opening:
            if self._shared.closed:
                raise RuntimeError("the client was closed")
            if not self._shared.open:
                await self._queue.open()
                self._shared.open = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what this client still waits for, and close its connections and files."""
        await self._feed.close()
        await self._queue.close()
        self._shared.open, self._shared.closed = False, True
        if self._shared.ready is not None:
            self._shared.ready[1].access.close()
            self._shared.ready = None
        self._shared.card = None

    async def models(self) -> list[ModelCard]:
        """Cards of the models that live workers serve, one per model id."""
        cards = {card.id: card for card in map(ModelCard.from_dict, await self._published())}
        return sorted(cards.values(), key=lambda card: card.id)

    async def _published(self) -> list[dict[str, Any]]:
        """What every live worker says of itself."""
        names = await self._queue.redis.zrangebyscore(keys.CARDS, time.time() - _CLOCKS_S, "+inf")
        found = await self._queue.redis.mget([keys.card(name.decode()) for name in names]) if names else []
        return [json.loads(raw) for raw in found if raw]

    async def card(self) -> ModelCard:
        """The card of this client's model.

        Raises
        ------
        UnknownModel
            No live worker serves it, or no model was named and the pool serves none or several.
        """
        await self._open()
        async with self._shared.connecting:
            return await self._card()

    async def status(self) -> list[dict[str, Any]]:
        """Per served model: jobs queued, running, finished and failed, and what its live workers say of themselves.

        Returns
        -------
        list[dict]
            `model`, `queued`, `running`, `finished`, `failed` (counts of RQ's queue and registries), and `workers`,
            each with `name` and the engine's counters: `time` (Unix, when they were read), `steps`, `tokens`, ...
        """
        workers: dict[str, list[dict[str, Any]]] = {}
        for document in await self._published():
            entry = {"name": document["worker"], **document.get("stats", {})}
            workers.setdefault(document["id"], []).append(entry)
        return [
            {"model": m, "workers": w, **await job_counts(self._queue.redis, m)} for m, w in sorted(workers.items())
        ]

    async def _rate(self) -> float | None:
        """Tokens per second that the live workers of this client's model have shown they run; None before that."""
        card = await self.card()
        stats = [said.get("stats", {}) for said in await self._published() if said["id"] == card.id]
        return sum(worker.get("busy_tokens_per_s", 0.0) for worker in stats) or None

    async def hooks(self) -> list[HookInfo]:
        """Hooks that the model serves, in network order, with widths."""
        return list((await self.card()).hooks.values())

    async def put(self, array: Any) -> ArrayRef:
        """Leave an array in the pool, by content hash, to be used in any number of interventions.

        Parameters
        ----------
        array
            Array-like of finite numbers; kept as float32.
        """
        values = as_float32(array, "array")
        digest = array_digest(values)
        await (await self._connect())[1].access.put_array(digest, values)
        return ArrayRef(digest, values.shape)

    async def _connect(self) -> tuple[ModelCard, Desk]:
        await self._open()
        async with self._shared.connecting:
            if self._shared.ready is None:
                card = await self._card()
                tokenizer = None
                if card.tokenizer is not None:
                    blob = await self._queue.redis.get(keys.tokenizer(card.tokenizer))
                    if blob is None:
                        raise UnknownModel(card.name, [])
                    tokenizer = await asyncio.to_thread(from_bytes, blob)
                access = await asyncio.to_thread(open_access, self._queue, card, self._store, self._inline_limit)
                self._shared.ready = card, Desk(self._queue, self._feed, access, tokenizer)
            return self._shared.ready

    async def _card(self) -> ModelCard:
        if self._shared.card is None:
            self._shared.card = self._choose(await self.models())
        return self._shared.card

    def _choose(self, cards: list[ModelCard]) -> ModelCard:
        fitting = [card for card in cards if self.model in (None, card.name, card.id)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise UnknownModel(self.model or "a model", sorted({card.name for card in cards}))
        raise InvalidJob("model", "several models fit" if self.model else "no model was named", _ids(fitting))


def _ids(cards: Iterable[ModelCard]) -> str:
    return ", ".join(card.id for card in cards)
