"""Many prompts: captures of all of them, what those would cost, and datasets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any, Unpack

from lenspool.arguments import CaptureOptions, Hooks, Interventions, ManyOptions, Prompt, check_names
from lenspool.client.calls import Calls
from lenspool.datasets.build import build
from lenspool.datasets.manifest import Dataset
from lenspool.datasets.options import DatasetOptions
from lenspool.datasets.place import place_of
from lenspool.hooks import resolve
from lenspool.interventions import listed
from lenspool.many import check_prompts, in_flight
from lenspool.plan import Plan, Tally
from lenspool.progress import progress_bar
from lenspool.readouts import Readout
from lenspool.result import Capture
from lenspool.sampling import check_integer
from lenspool.staged import mean_norms

_CONCURRENCY = 256


class Many(Calls):
    """A client's calls about many prompts."""

    async def map(
        self, prompts: Iterable[Prompt], hooks: Hooks, *, ordered: bool = True, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[Any]:
        """Capture many prompts, at most `concurrency` at a time; prompts are drawn as results are taken.

        The jobs' priority is `"batch"`, unless `priority="interactive"` is given.

        Memory is bounded whatever the number of prompts: there are at most `concurrency` captures that have not been
        taken. With the store at hand they hold no rows before they are looked at; through Redis each holds its rows,
        up to `inline_limit`.

        Parameters
        ----------
        prompts, hooks
            As of `capture`; any number of prompts.
        ordered
            In the order of the prompts, or as they finish (`as_completed` also tells which).
        options
            Those of `capture`; `concurrency=256`, `return_exceptions=False`, `progress=False`: see
            `lenspool.client.ManyOptions`.

        Yields
        ------
        Capture
            With `return_exceptions=True` an error takes its result's place, otherwise it is raised and the rest is
            cancelled.
        """
        check_names("map", options, ManyOptions)
        pairs = self._captures(prompts, hooks, options, ordered=ordered)
        async with contextlib.aclosing(pairs):
            async for _, result in pairs:
                yield result

    async def as_completed(
        self, prompts: Iterable[Prompt], hooks: Hooks, **options: Unpack[ManyOptions]
    ) -> AsyncIterator[tuple[int, Any]]:
        """Capture many prompts; the arguments are those of `map`.

        Yields
        ------
        tuple[int, Capture]
            Index of the prompt and its capture, as they finish.
        """
        check_names("as_completed", options, ManyOptions)
        pairs = self._captures(prompts, hooks, options, ordered=False)
        async with contextlib.aclosing(pairs):
            async for pair in pairs:
                yield pair

    async def _captures(
        self, prompts: Iterable[Prompt], hooks: Hooks, options: Mapping[str, Any], *, ordered: bool
    ) -> AsyncGenerator[tuple[int, Any]]:
        check_prompts(prompts)
        names = [hooks] if isinstance(hooks, (str, Readout)) else list(hooks)
        concurrency = check_integer("concurrency", options.get("concurrency", _CONCURRENCY), 1, None)
        each: Any = {name: value for name, value in options.items() if name in CaptureOptions.__annotations__}
        each = {"priority": "batch", **self._options, **each}

        async def call(prompt: Prompt) -> Capture:
            return await self.capture(prompt, names, **each)

        running = in_flight(
            prompts,
            call,
            concurrency=concurrency,
            ordered=ordered,
            return_exceptions=options.get("return_exceptions", False),
        )
        with progress_bar(options.get("progress", False), prompts, "capture") as advance:
            async with contextlib.aclosing(running) as pairs:
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
        """What `map` over these prompts would cost: what is in the store, and tokens, bytes and time of what is not.

        Nothing is queued, but for interventions that need an answer of the pool (`relative`, `swap_rows`).

        Raises
        ------
        InvalidJob
            A prompt or another argument is wrong.
        """
        check_prompts(prompts)
        names = [hooks] if isinstance(hooks, (str, Readout)) else list(hooks)
        items = listed(interventions)
        options = {"positions": positions, "interventions": items}
        tally = Tally((await self._connect())[1].access)
        with progress_bar(progress, prompts, "plan") as advance:
            for prompt in prompts:
                await tally.add((await self._request(prompt, names, options))[1])
                advance()
        return tally.plan(await self._rate())

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
            Those of `capture`, columns, packing, folder, progress, ...: see `lenspool.client.DatasetOptions`.

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
