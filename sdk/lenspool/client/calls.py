"""One call, one answer: captures and generations that are waited for."""

from __future__ import annotations

import asyncio
from typing import Literal, Unpack, overload

from lenspool.arguments import CaptureOptions, GenerateOptions, Hooks, Prompt, check_names, sampling_of
from lenspool.client.requesting import Requesting
from lenspool.errors import InvalidJob
from lenspool.generation import Generation
from lenspool.result import Capture
from lenspool.sampling import check_integer, sampling_document
from lenspool.streaming import Tell, TokenStream


class Calls(Requesting):
    """A client's calls about one prompt."""

    async def capture(self, prompt: Prompt, hooks: Hooks, **options: Unpack[CaptureOptions]) -> Capture:
        """Activations of a prompt.

        Parameters
        ----------
        prompt
            Text, chat messages, or token ids: one prompt. For several there is `map`.
        hooks
            Names, aliases, short forms or globs: `"blocks.*.hook_resid_post"`, `"resid_post.5"`, `"logits"`; and
            readouts of them: `top_k("logits", 10)`, see `lenspool.readouts`.
        options
            `positions="all"`, `interventions=()`; and of every call `priority`, `timeout`, `queue_timeout`,
            `run_timeout`, `retries`, `reuse`: see `lenspool.client.CaptureOptions` and `Options`.

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
        check_names("capture", options, CaptureOptions)
        how = self._manner(options)
        desk, request = await self._request(prompt, hooks, options)
        return await self._answered(desk, request, Capture, how)

    @overload
    async def generate(  # type: ignore[overload-overlap]  # 1 is the one int that gives no list
        self, prompt: Prompt, *, n: Literal[1] = 1, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    async def generate(self, prompt: Prompt, *, n: int, **options: Unpack[GenerateOptions]) -> list[Generation]: ...

    async def generate(
        self, prompt: Prompt, *, n: int = 1, **options: Unpack[GenerateOptions]
    ) -> Generation | list[Generation]:
        """Generate, with activations and edits in prefill and decode.

        Greedy and seeded generations are stored like captures; sampling without a seed always runs anew. A seeded
        generation has the same tokens whatever else is in the batch, but for logits that are equal to float rounding.

        Parameters
        ----------
        prompt
            As in `capture`.
        n
            Number of samples. Sample i of a seeded call is that of a single call with `seed + i`.
        options
            Those of `capture`; `hooks`; and `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, `logprobs`, ...: see
            `lenspool.client.GenerateOptions` and `lenspool.sampling.Sampling`.

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
        check_names("generate", options, GenerateOptions)
        how = self._manner(options)
        count = check_integer("n", n, 1, None)
        sampling = sampling_document(**sampling_of(options))
        seed = sampling["seed"]
        if count > 1 and sampling["temperature"] == 0:
            raise InvalidJob("n", f"got {n} at temperature 0, where all samples are equal", "1, or a temperature")
        if seed is not None:
            check_integer("seed", seed, 0, 2**63 - count)
        desk, first = await self._request(prompt, options.get("hooks", ()), options, sampling)
        if count == 1:
            return await self._answered(desk, first, Generation, how)
        requests = [first, *(first.resampled(None if seed is None else seed + i) for i in range(1, count))]
        samples = [asyncio.create_task(self._answered(desk, request, Generation, how)) for request in requests]
        try:
            return list(await asyncio.gather(*samples))
        finally:
            for sample in samples:
                sample.cancel()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TokenStream:
        """Generate, and read the tokens while they are made; the arguments are those of `generate`.

        A stored generation comes at once, in one piece.

        Returns
        -------
        TokenStream
            To be iterated with `async for`; its `result` is then the `Generation`.
        """
        check_names("stream", options, GenerateOptions)

        async def answer(tell: Tell) -> Generation:
            how = self._manner(options)
            sampling = sampling_document(**sampling_of(options))
            desk, request = await self._request(prompt, options.get("hooks", ()), options, sampling)
            return await self._answered(desk, request, Generation, how, tell=tell)

        return TokenStream(answer)
