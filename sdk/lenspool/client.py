"""The async client: `await client.capture(prompt, hooks)`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

import numpy as np

from lenspool.answer import Desk
from lenspool.connection import Connection
from lenspool.datasets.build import build, place_of
from lenspool.datasets.manifest import Dataset
from lenspool.datasets.options import DatasetOptions
from lenspool.errors import InvalidJob
from lenspool.handle import Job, record_of
from lenspool.hooks import resolve
from lenspool.interventions import Intervention
from lenspool.job import Request, prepare, tokenize
from lenspool.many import in_flight, progress_bar
from lenspool.places import Tokens, located
from lenspool.plan import Plan, Tally
from lenspool.readouts import Readout
from lenspool.result import Capture, Generation
from lenspool.sampling import Sampling, check_integer, sampling_document
from lenspool.staged import mean_norms, resolved
from lenspool.streaming import Tell, TokenStream
from lenspool.terms import Lane, Terms

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""Text, chat messages, or token ids (taken verbatim)."""

Hooks = str | Readout | Iterable[str | Readout]
"""What to capture: names, aliases, short forms, globs, and readouts."""

Interventions = Intervention | Iterable[Intervention]


class Client(Connection):
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

    async def dataset(self, name: str, rows: Any, hooks: Hooks, **options: Unpack[DatasetOptions]) -> Dataset:
        """Capture a whole dataset, and keep it under a name: any number of rows, in bounded memory.

        The job may be killed at any point, and goes on when the same call is made again; several processes that make
        it share the work. What it has is pinned in the store, so that no limit evicts it.

        Parameters
        ----------
        name
            Of the dataset, for `open_dataset`.
        rows
            An iterable of prompts or of mappings with a column for the prompt; a `datasets.Dataset`; or the path of a
            `.jsonl`, `.parquet` or `.csv` file. The same ones at each call.
        hooks
            As in `capture`.
        options
            See `lenspool.datasets.options.DatasetOptions`: columns, packing, positions, interventions, progress, ...

        Returns
        -------
        Dataset
            Once all rows are done. Rows that failed are in its `failures()`; those whose error may pass are tried
            again by the next call.

        Raises
        ------
        InvalidJob
            An argument is wrong, the rows are not those of before, or the client cannot write to the store.
        PoolUnavailable, CacheFull
            What is done is kept.
        """
        return await build(self, name, rows, hooks, **options)

    async def open_dataset(self, name: str) -> Dataset:
        """A finished dataset of this pool's store. One in a folder of its own: `lenspool.Dataset(folder)`.

        Raises
        ------
        InvalidJob
            There is none of this name, or it is not finished.
        """
        store = (await self._connect())[1].access.store
        return Dataset(place_of(store, name, None))

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
