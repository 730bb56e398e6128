"""A job that goes on without its client: `job = await client.submit_capture(...)`, later `client.job(id)`."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lenspool.card import ModelCard
from lenspool.errors import InvalidJob, JobCancelled
from lenspool.generation import Generation
from lenspool.job import Request
from lenspool.result import Capture

if TYPE_CHECKING:
    from lenspool.client.submitting import Submitting

ResultT = TypeVar("ResultT", Capture, Generation)

_NOT_KEPT = ("card", "arrays")
"""Fields of a request that its record does not hold: the card is known by its id, the arrays are in the pool."""


class Job(Generic[ResultT]):
    """A job of the pool.

    Equal requests are one job and have one id. It runs whether this process lives or not, until it is cancelled.

    Attributes
    ----------
    id
        For `client.job(id)`, in any process, for a week.
    """

    def __init__(self, client: Submitting, job_id: str, request: Request | None = None) -> None:
        self.id = job_id
        self._client = client
        self._request = request
        self._cancelled = False
        self._waiting: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    async def status(self) -> str:
        """One of `queued`, `started`, `finished`, `failed`, `cancelled`, `unknown` (Redis has forgotten it)."""
        if self._cancelled:
            return "cancelled"
        status = await self._client._queue.status(self.id)
        if status == "unknown" and await self._client._stored(await self._load()):
            return "finished"
        return status

    async def position(self) -> int | None:
        """How many jobs of the same client and lane are before it; None when it does not wait.

        Clients take turns, so this says how many of its own turns the job has to wait.
        """
        return await self._client._orders.position(self.id)

    async def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the result. Cancelling this does not cancel the job.

        Raises
        ------
        LenspoolError
            The job's own error; `JobCancelled`; `DeadlineExceeded` after `timeout` seconds (the job goes on).
        """
        request = await self._load()
        if self._cancelled:
            raise JobCancelled("the job was cancelled", job_id=self.id)
        work: asyncio.Task[ResultT] = asyncio.create_task(self._client._result_of(self.id, request, timeout))
        self._waiting.add(work)
        try:
            await asyncio.wait([work])
            if work.cancelled():
                raise JobCancelled("the job was cancelled", job_id=self.id)
            return work.result()
        finally:
            self._waiting.discard(work)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def cancel(self) -> None:
        """Withdraw the job: it is stopped, unless other callers wait for its result at this moment."""
        request = await self._load()
        self._cancelled = True
        for work in list(self._waiting):
            work.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        await self._client._orders.withdraw(request.card.id, self.id)

    async def _load(self) -> Request:
        if self._request is None:
            record = await self._client._orders.fetch(self.id)
            if record is None:
                raise InvalidJob("id", f"the pool knows no job {self.id}", "the id of a submitted job of the last week")
            self._request = request_of(record, await self._client.card())
        return self._request


def record_of(request: Request) -> dict[str, Any]:
    """A request as JSON, for other processes."""
    kept = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in _NOT_KEPT}
    return {**kept, "model": request.card.id}


def request_of(record: dict[str, Any], card: ModelCard) -> Request:
    """The request of a record.

    Raises
    ------
    InvalidJob
        It belongs to another model than the card's.
    """
    record = dict(record)
    if (model := record.pop("model")) != card.id:
        raise InvalidJob("id", f"the job is of {model}, this client asks {card.id}", f"Client(model={model!r})")
    ranges = [(start, stop) for start, stop in record.pop("ranges")]
    return Request(card=card, arrays={}, ranges=ranges, **record)
