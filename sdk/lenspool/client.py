"""The async client: `await client.capture(prompt, hooks)`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import numpy as np

from lenspool import keys
from lenspool.access import open_access
from lenspool.answer import Desk
from lenspool.card import HookInfo, ModelCard
from lenspool.counts import job_counts
from lenspool.errors import InvalidJob, UnknownModel
from lenspool.handle import Job, record_of
from lenspool.hooks import resolve
from lenspool.interventions import ArrayRef, Intervention, as_float32
from lenspool.job import Request, prepare, tokenize
from lenspool.many import in_flight, progress_bar
from lenspool.orders import Orders
from lenspool.places import Tokens, located
from lenspool.plan import Plan, Tally
from lenspool.queue import JobQueue
from lenspool.readouts import Readout
from lenspool.result import Capture, Generation
from lenspool.sampling import Sampling, check_integer, sampling_document
from lenspool.staged import mean_norms, resolved
from lenspool.streaming import Tell, TokenStream
from lenspool.terms import Lane, Terms
from lenspool.token_feed import TokenFeed
from lenspool.tokenizer import from_bytes
from lenspool_cache.keys import array_digest

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""Text, chat messages, or token ids (taken verbatim)."""

Hooks = str | Readout | Iterable[str | Readout]
"""What to capture: names, aliases, short forms, globs, and readouts."""

Interventions = Intervention | Iterable[Intervention]

_CLOCKS_S = 600.0
"""How far the clocks of workers and clients may differ: whether a worker lives is said by its card, which expires."""


class Client:
    """A connection to a pool.

    Parameters
    ----------
    url
        Redis: `redis://`, `rediss://` or `unix://`; default `LENSPOOL_REDIS`, then `redis://localhost:6379`.
    model
        Name (or id) of a served model; default `LENSPOOL_MODEL`; may be left out when the pool serves just one.
    store
        Folder of the pool's store; default `LENSPOOL_STORE`, then the folder that the worker names, when that is
        reachable from here. Without a reachable store, or with `store=False`, results ride through Redis.
    inline_limit
        Largest result, in bytes, that may ride through Redis.
    patience
        Seconds for which a call waits for a broker or a worker that is gone before it raises `PoolUnavailable`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str | None = None,
        store: str | Path | Literal[False] | None = None,
        inline_limit: int = 16 * 2**20,
        patience: float = 120.0,
    ) -> None:
        self.url = url or os.environ.get("LENSPOOL_REDIS") or "redis://localhost:6379"
        self.model = model or os.environ.get("LENSPOOL_MODEL")
        self._store = os.environ.get("LENSPOOL_STORE") if store is None else store
        self._inline_limit = inline_limit
        self._queue = JobQueue(self.url, patience=patience)
        self._orders = Orders(self._queue)
        self._feed = TokenFeed(self._queue, self.url)
        self._ready: tuple[ModelCard, Desk] | None = None
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._queue.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what this client still waits for, and close its connections and files."""
        await self._feed.close()
        await self._queue.close()
        if self._ready is not None:
            self._ready[1].access.close()
            self._ready = None

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
        return (await self._connect())[0]

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

    async def hooks(self) -> list[HookInfo]:
        """Hooks that the model serves, in network order, with widths."""
        return list((await self.card()).hooks.values())

    async def tokens(self, prompt: Prompt) -> Tokens:
        """The tokens of a prompt, as it would run: ids, text and positions, shown as a table.

        Raises
        ------
        InvalidJob
            It is no prompt of this model.
        """
        card, desk = await self._connect()
        ids = tokenize(card, desk.tokenizer, prompt)
        return Tokens(ids, desk.tokenizer.tokens(ids) if desk.tokenizer else None, desk.tokenizer)

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

    async def norms(self, hooks: str | Iterable[str], prompts: Iterable[Prompt] | None = None) -> dict[str, float]:
        """How long rows are at some hooks: what the coefficient of an edit is to be measured by.

        Parameters
        ----------
        hooks
            Names, aliases, short forms or globs.
        prompts
            What to run; default a few sentences. Captures, so of equal prompts the second call is answered at once.

        Returns
        -------
        dict[str, float]
            Hook -> mean L2 norm of its rows over all positions but the first of each prompt, which in many models is
            an attention sink of another size.
        """
        return await mean_norms(self, resolve(hooks, await self.card()), prompts)

    async def capture(
        self,
        prompt: Prompt,
        hooks: Hooks,
        *,
        positions: Any = "all",
        interventions: Interventions = (),
        lane: Lane = "interactive",
        timeout: float | None = None,
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
    ) -> Capture:
        """Activations of a prompt.

        Parameters
        ----------
        prompt
            Text, chat messages, or token ids: one prompt. For several there is `map`.
        hooks
            Names, aliases, short forms or globs: `"blocks.*.hook_resid_post"`, `"resid_post.5"`, `"logits"`; and
            readouts of them: `top_k("logits", 10)`, see `lenspool.readouts`.
        positions
            `"all"`, `"last"`, an int, a list of ints, a slice, or `at("Paris")`; see `lenspool.positions`.
        interventions
            Edits made during the run; captures show the edited values.
        lane
            `"batch"` for what takes its time: jobs in it let others pass.
        timeout, queue_timeout, run_timeout
            Seconds for everything, until the job is started, and for its run. Then `DeadlineExceeded`, whose `stage`
            says where the job stood. None waits as long as the pool lives.

        Returns
        -------
        Capture
            Arrays `[rows, width]` by hook name.

        Raises
        ------
        InvalidJob
            An argument is wrong; nothing was queued.
        PoolUnavailable, DeadlineExceeded, EngineFailed, WorkerLost, CacheError
            See `lenspool.errors`.
        """
        desk, request = await self._request(prompt, hooks, positions, interventions)
        return await desk.answer(request, Capture, timeout, Terms(lane, queue_timeout, run_timeout))

    async def submit_capture(
        self,
        prompt: Prompt,
        hooks: Hooks,
        *,
        positions: Any = "all",
        interventions: Interventions = (),
        lane: Lane = "interactive",
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
    ) -> Job[Capture]:
        """Like `capture`, without waiting: the job runs also when this process ends.

        Raises
        ------
        InvalidJob, QueueFull, PoolUnavailable
            Nothing was queued.
        """
        _, request = await self._request(prompt, hooks, positions, interventions)
        return await self._submit(request, Terms(lane, queue_timeout, run_timeout))

    @overload
    async def generate(  # type: ignore[overload-overlap]  # 1 is the one int that gives no list
        self,
        prompt: Prompt,
        *,
        n: Literal[1] = 1,
        hooks: Hooks = (),
        positions: Any = "all",
        interventions: Interventions = (),
        lane: Lane = "interactive",
        timeout: float | None = None,
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation: ...

    @overload
    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int,
        hooks: Hooks = (),
        positions: Any = "all",
        interventions: Interventions = (),
        lane: Lane = "interactive",
        timeout: float | None = None,
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Generation]: ...

    async def generate(
        self,
        prompt: Prompt,
        *,
        n: int = 1,
        hooks: Hooks = (),
        positions: Any = "all",
        interventions: Interventions = (),
        lane: Lane = "interactive",
        timeout: float | None = None,
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation | list[Generation]:
        """Generate, with activations and edits in prefill and decode.

        Greedy and seeded generations are stored like captures; sampling without a seed always runs anew. A seeded
        generation has the same tokens whatever else is in the batch, but for logits that are equal to float rounding.

        Parameters
        ----------
        prompt, hooks, interventions, lane, timeout, queue_timeout, run_timeout
            As in `capture`.
        n
            Number of samples. Sample i of a seeded call is that of a single call with `seed + i`.
        positions
            Also `"prompt"` and `"generated"`; `"all"` is both. The row of position p is the one from which token p+1
            is predicted, so the first generated token is predicted by the prompt's last row.
        sampling
            `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, `logprobs`, ...: see `lenspool.sampling.Sampling`.

        Returns
        -------
        Generation or list[Generation]
            A list of `n` when `n` is above 1.

        Raises
        ------
        InvalidJob
            An argument is wrong; nothing was queued.
        PoolUnavailable, DeadlineExceeded, EngineFailed, WorkerLost, CacheError
            See `lenspool.errors`.
        """
        terms = Terms(lane, queue_timeout, run_timeout)
        count = check_integer("n", n, 1, None)
        chosen = sampling_document(**sampling)
        seed = chosen["seed"]
        if count > 1 and chosen["temperature"] == 0:
            raise InvalidJob("n", f"got {n} at temperature 0, where all samples are equal", "1, or a temperature")
        if seed is not None:
            check_integer("seed", seed, 0, 2**63 - count)
        desk, first = await self._generating(prompt, hooks, positions, interventions, chosen)
        if count == 1:
            return await desk.answer(first, Generation, timeout, terms)
        requests = [first, *(first.resampled(None if seed is None else seed + i) for i in range(1, count))]
        samples = [asyncio.create_task(desk.answer(request, Generation, timeout, terms)) for request in requests]
        try:
            return list(await asyncio.gather(*samples))
        finally:
            for sample in samples:
                sample.cancel()

    def stream(
        self,
        prompt: Prompt,
        *,
        hooks: Hooks = (),
        positions: Any = "all",
        interventions: Interventions = (),
        lane: Lane = "interactive",
        timeout: float | None = None,
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> TokenStream:
        """Generate, and read the tokens while they are made; the arguments are those of `generate`.

        A stored generation comes at once, in one piece.

        Returns
        -------
        TokenStream
            To be iterated with `async for`; its `result` is then the `Generation`.
        """

        async def answer(tell: Tell) -> Generation:
            chosen = sampling_document(**sampling)
            desk, request = await self._generating(prompt, hooks, positions, interventions, chosen)
            return await desk.answer(request, Generation, timeout, Terms(lane, queue_timeout, run_timeout), tell=tell)

        return TokenStream(answer)

    async def submit_generate(
        self,
        prompt: Prompt,
        *,
        hooks: Hooks = (),
        positions: Any = "all",
        interventions: Interventions = (),
        lane: Lane = "interactive",
        queue_timeout: float | None = None,
        run_timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Job[Generation]:
        """Like `generate`, without waiting: the job runs also when this process ends; see `submit_capture`."""
        chosen = sampling_document(**sampling)
        _, request = await self._generating(prompt, hooks, positions, interventions, chosen)
        return await self._submit(request, Terms(lane, queue_timeout, run_timeout))

    async def _generating(
        self, prompt: Prompt, hooks: Hooks, positions: Any, interventions: Interventions, sampling: dict[str, Any]
    ) -> tuple[Desk, Request]:
        card, desk = await self._connect()
        if sampling["stop"] and desk.tokenizer is None:
            raise InvalidJob("stop", f"{card.name} was served without a tokenizer", "no stop strings")
        return await self._request(prompt, hooks, positions, interventions, sampling)

    async def _request(
        self,
        prompt: Prompt,
        hooks: Hooks,
        positions: Any,
        interventions: Interventions,
        sampling: dict[str, Any] | None = None,
    ) -> tuple[Desk, Request]:
        """Check a call's arguments, and ask the pool for what they stand for."""
        card, desk = await self._connect()
        tokens = tokenize(card, desk.tokenizer, prompt)
        positions, items = located(positions, interventions, tokens, desk.tokenizer)
        items, norms = await resolved(self, tokens, items)
        return desk, prepare(card, desk.tokenizer, tokens, hooks, positions, items, sampling, norms)

    async def map(
        self,
        prompts: Iterable[Prompt],
        hooks: Hooks,
        *,
        concurrency: int = 256,
        ordered: bool = True,
        return_exceptions: bool = False,
        progress: bool = False,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """Capture many prompts, at most `concurrency` at a time; prompts are drawn as results are taken.

        The jobs wait in the batch lane, unless `lane="interactive"` is given.

        Memory is bounded whatever the number of prompts: there are at most `concurrency` captures that have not been
        taken. With the store at hand they hold no rows before they are looked at; through Redis each holds its rows,
        up to `inline_limit`.

        Parameters
        ----------
        progress
            Show a bar on stderr, in a terminal or notebook only.
        options
            As of `capture`.

        Yields
        ------
        Capture
            In the order of the prompts, or as they finish when `ordered=False` (`as_completed` also tells which). With
            `return_exceptions=True` an error takes its result's place, otherwise it is raised and the rest is
            cancelled.
        """
        pairs = self._captures(
            prompts, hooks, concurrency, progress, options, ordered=ordered, return_exceptions=return_exceptions
        )
        async with contextlib.aclosing(pairs):
            async for _, result in pairs:
                yield result

    async def as_completed(
        self,
        prompts: Iterable[Prompt],
        hooks: Hooks,
        *,
        concurrency: int = 256,
        return_exceptions: bool = False,
        progress: bool = False,
        **options: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        """Capture many prompts; the arguments are those of `map`.

        Yields
        ------
        tuple[int, Capture]
            Index of the prompt and its capture, as they finish.
        """
        pairs = self._captures(
            prompts, hooks, concurrency, progress, options, ordered=False, return_exceptions=return_exceptions
        )
        async with contextlib.aclosing(pairs):
            async for pair in pairs:
                yield pair

    async def _captures(
        self,
        prompts: Iterable[Prompt],
        hooks: Hooks,
        concurrency: int,
        progress: bool,
        options: Mapping[str, Any],
        **how: bool,
    ) -> AsyncGenerator[tuple[int, Any]]:
        names = [hooks] if isinstance(hooks, (str, Readout)) else list(hooks)
        options = {"lane": "batch", **options}
        check_integer("concurrency", concurrency, 1, None)

        async def call(prompt: Prompt) -> Capture:
            return await self.capture(prompt, names, **options)

        with progress_bar(progress, prompts, "capture") as advance:
            async with contextlib.aclosing(in_flight(prompts, call, concurrency=concurrency, **how)) as pairs:
                async for pair in pairs:
                    advance()
                    yield pair

    async def plan(
        self,
        prompts: Iterable[Prompt],
        hooks: Hooks,
        *,
        positions: Any = "all",
        interventions: Interventions = (),
        progress: bool = False,
    ) -> Plan:
        """What `map` over these prompts would cost: what is in the store, and the tokens and bytes that are not.

        Nothing is queued, but for interventions that need an answer of the pool (`relative`, `swap_rows`).

        Raises
        ------
        InvalidJob
            A prompt or another argument is wrong.
        """
        names = [hooks] if isinstance(hooks, (str, Readout)) else list(hooks)
        items = [interventions] if isinstance(interventions, Intervention) else list(interventions)
        tally = Tally((await self._connect())[1].access)
        with progress_bar(progress, prompts, "plan") as advance:
            for prompt in prompts:
                await tally.add((await self._request(prompt, names, positions, items))[1])
                advance()
        return tally.plan

    def job(self, id: str) -> Job[Any]:
        """The handle of a job that was submitted here or elsewhere, by its id."""
        return Job(self, id)

    async def _submit(self, request: Request, terms: Terms) -> Job[Any]:
        """Queue the whole request as one job, unless the store has it."""
        document = request.document(request.whole)
        job_id = await self._orders.record(document, record_of(request))
        if not await self._stored(request):
            access = (await self._connect())[1].access
            await asyncio.gather(*(access.put_array(digest, array) for digest, array in request.arrays.items()))
            await self._orders.place(request.card.id, document, terms)
        return Job(self, job_id, request)

    async def _stored(self, request: Request) -> bool:
        """Whether the store has all of a request."""
        return (await (await self._connect())[1].access.find(request, ran=False)).complete

    async def _result_of(self, job_id: str, request: Request, timeout: float | None) -> Any:
        """The result of a submitted job."""
        if not await self._stored(request):
            failure = await self._orders.failure(job_id)
            if failure is not None:
                raise failure
        kind: Any = Capture if request.sampling is None else Generation
        desk = (await self._connect())[1]
        return await desk.answer(request, kind, timeout, Terms("batch", follow=True), whole=True)

    async def _connect(self) -> tuple[ModelCard, Desk]:
        async with self._connecting:
            if self._ready is None:
                card = self._choose(await self.models())
                tokenizer = None
                if card.tokenizer is not None:
                    blob = await self._queue.redis.get(keys.tokenizer(card.tokenizer))
                    if blob is None:
                        raise UnknownModel(card.name, [])
                    tokenizer = await asyncio.to_thread(from_bytes, blob)
                access = await asyncio.to_thread(open_access, self._queue, card, self._store, self._inline_limit)
                self._ready = card, Desk(self._queue, self._feed, access, tokenizer)
            return self._ready

    def _choose(self, cards: list[ModelCard]) -> ModelCard:
        fitting = [card for card in cards if self.model in (None, card.name, card.id)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            raise UnknownModel(self.model or "a model", sorted({card.name for card in cards}))
        raise InvalidJob("model", "several models fit" if self.model else "no model was named", _ids(fitting))


def _ids(cards: Iterable[ModelCard]) -> str:
    return ", ".join(card.id for card in cards)
