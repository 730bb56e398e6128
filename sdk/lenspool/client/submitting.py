"""Jobs that go on without their client."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Unpack

from lenspool import spans
from lenspool.arguments import (
    Hooks,
    Manner,
    Prompt,
    SubmitGenerateOptions,
    SubmitOptions,
    check_names,
    sampling_of,
)
from lenspool.client.requesting import Requesting
from lenspool.generation import Generation
from lenspool.handle import Job, record_of
from lenspool.job import Request
from lenspool.result import Capture
from lenspool.retrying import persistent
from lenspool.sampling import sampling_document
from lenspool.terms import Terms


class Submitting(Requesting):
    """A client's calls that do not wait."""

    async def submit_capture(self, prompt: Prompt, hooks: Hooks, **options: Unpack[SubmitOptions]) -> Job[Capture]:
        """Like `capture`, without waiting: the job runs also when this process ends.

        Parameters
        ----------
        prompt, hooks, options
            As of `capture`, but `timeout`.

        Raises
        ------
        InvalidJob, QueueFull, PoolUnavailable
            Nothing was queued.
        """
        check_names("submit_capture", options, SubmitOptions)
        _, request = await self._request(prompt, hooks, options)
        return await self._submit(request, self._manner(options))

    async def submit_generate(self, prompt: Prompt, **options: Unpack[SubmitGenerateOptions]) -> Job[Generation]:
        """Like `generate`, without waiting: the job runs also when this process ends; see `submit_capture`."""
        check_names("submit_generate", options, SubmitGenerateOptions)
        sampling = sampling_document(**sampling_of(options))
        _, request = await self._request(prompt, options.get("hooks", ()), options, sampling)
        return await self._submit(request, self._manner(options))

    def job(self, id: str) -> Job[Any]:
        """The handle of a job that was submitted here or elsewhere, by its id."""
        return Job(self, id)

    async def _submit(self, request: Request, how: Manner) -> Job[Any]:
        """Queue the whole request as one job, unless the store has it."""
        document = request.document(request.whole)

        async def submit(timeout: float | None) -> str:
            job_id = await self._orders.record(document, record_of(request))
            if not await self._stored(request):
                access = (await self._connect())[1].access
                await asyncio.gather(*(access.put_array(digest, array) for digest, array in request.arrays.items()))
                terms = dataclasses.replace(how.terms, trace=spans.traceparent())
                await self._orders.place(request.card.id, document, terms)
            return job_id

        with spans.asking(request, "submit"):
            return Job(self, await persistent(submit, None, how.retries), request)

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
