"""What an operator sees of a pool's jobs, whoever asked for them, and does to them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rq.utils import utcparse

from lenspool import keys, scripts
from lenspool.errors import InvalidJob
from lenspool.orders import Orders
from lenspool.queue import JobQueue
from lenspool.submission import JOB_PREFIX, QUEUE_PREFIX, RESULT_PREFIX, Submissions, error_of, result_of
from lenspool.terms import PRIORITIES, Terms

State = Literal["waiting", "running", "failed"]

_FIELDS = ("enqueued_at", "started_at", "ended_at", "lane", "client", "worker_name")
_RETURNED = "returned"


@dataclass(frozen=True)
class JobView:
    """A job as an operator sees it.

    Attributes
    ----------
    model, id
        Card id of its model, and its own id.
    state
        `waiting`, `running` or `failed`.
    lane
        `interactive`, `batch`, or `returned`: it lost its worker and waits to run again.
    client
        Client that asked for it first.
    position
        Jobs in front of it in its client's queue of that lane, of one that waits. Clients take turns, so this is how
        many of its client's turns it has to wait.
    seconds
        For which it has waited, run, or been over.
    worker
        Which runs it, or ran it last.
    error
        Why it failed.
    """

    model: str
    id: str
    state: State
    lane: str
    client: str
    position: int | None
    seconds: float
    worker: str
    error: str = ""


class Operator:
    """The jobs of a pool, through the connections of a `JobQueue`."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self._submissions = Submissions(queue.id)
        self._redis: Any = queue.redis  # redis-py types a command as either sync or async

    async def jobs(self, *, model: str | None = None, limit: int = 100) -> list[JobView]:
        """Jobs that wait, run and have failed lately, in this order; at most `limit` of each queue and registry.

        Parameters
        ----------
        model
            Name or id; default all models that are served or have jobs.
        """
        views = []
        for card_id in await self._card_ids():
            if model in (None, card_id, card_id.partition("@")[0]):
                views += await self._of(card_id, limit)
        return views

    async def cancel(self, job: str) -> str:
        """Take a job out of the pool, whoever waits for it: they get `JobCancelled`.

        Parameters
        ----------
        job
            Its id, or the first characters of one that is listed.

        Returns
        -------
        str
            The id.

        Raises
        ------
        InvalidJob
            No such job waits or runs.
        """
        job_id, card_id, state = await self._found(job)
        if state not in ("queued", "started"):
            raise InvalidJob("id", f"job {job_id} is {state}", "a job that waits or runs")
        touched, arguments = self._submissions.cancel(job_id, card_id, kept=True)
        told = [keys.DONE_PREFIX, keys.DONE_TTL, job_id, "canceled", ""]
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.eval(scripts.NOTIFY, 1, keys.waiters(job_id), *told)
            pipeline.eval(scripts.CANCEL, len(touched), *touched, *arguments)
            await pipeline.execute()
        return job_id

    async def requeue(self, job: str) -> str:
        """Have a job that failed or was cancelled run again, with all its attempts before it.

        Returns
        -------
        str
            The id.

        Raises
        ------
        InvalidJob
            No such job is known, or it waits, runs or has finished.
        QueueFull, PoolUnavailable
            It was not queued.
        """
        job_id, card_id, state = await self._found(job)
        if state not in ("failed", "canceled", "stopped"):
            raise InvalidJob("id", f"job {job_id} is {state}", "a job that failed or was cancelled")
        fields = await self._redis.hgetall(JOB_PREFIX + job_id)
        document = self._submissions.document(job_id, fields)
        lane = fields.get(b"lane", b"").decode()
        terms = Terms(lane if lane in PRIORITIES else "interactive")
        await Orders(self._queue).place(card_id, document, terms)
        return job_id

    async def _card_ids(self) -> list[str]:
        workers = [name.decode() for name in await self._redis.zrange(keys.CARDS, 0, -1)]
        cards = await self._redis.mget([keys.card(name) for name in workers]) if workers else []
        served = {json.loads(card)["id"] for card in cards if card}
        queues = {key.decode() for key in await self._redis.smembers(b"rq:queues")}
        prefix = QUEUE_PREFIX + keys.queue_name("")
        with_jobs = {name.removeprefix(prefix).split(":")[0] for name in queues if name.startswith(prefix)}
        return sorted(served | with_jobs)

    async def _of(self, card_id: str, limit: int) -> list[JobView]:
        places = [key.decode() for key in await self._redis.zrange(keys.ring(card_id), 0, -1)]
        back = (keys.queue_name(card_id), keys.suspects_name(card_id), keys.alone_name(card_id))
        places = [*(QUEUE_PREFIX + name for name in back), *places]
        name = keys.queue_name(card_id)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for place in places:
                pipeline.lrange(place, 0, limit - 1)
            pipeline.zrange(f"rq:wip:{name}", 0, limit - 1)
            pipeline.zrevrange(f"rq:failed:{name}", 0, limit - 1)
            *waiting, running, failed = await pipeline.execute()
        found: list[tuple[State, str, int | None, bool]] = []
        for place, ids in zip(places, waiting, strict=True):
            returned = place.rsplit(":", 2)[-2] not in PRIORITIES
            found += [("waiting", job.decode(), i, returned) for i, job in enumerate(ids)]
        started = dict.fromkeys(job.decode().partition(":")[0] for job in running)  # of rq's job:execution
        found += [("running", job, None, False) for job in started]
        found += [("failed", job.decode(), None, False) for job in failed]
        return await self._viewed(card_id, found)

    async def _viewed(self, card_id: str, found: Iterable[tuple[State, str, int | None, bool]]) -> list[JobView]:
        found = list(found)
        if not found:
            return []
        async with self._redis.pipeline(transaction=False) as pipeline:
            for _, job, *_ in found:
                pipeline.hmget(JOB_PREFIX + job, *_FIELDS)
                pipeline.xrevrange(RESULT_PREFIX + job, count=1)
            replies = await pipeline.execute()
        views, now = [], time.time()
        for (state, job, position, returned), values, last in zip(found, replies[::2], replies[1::2], strict=True):
            said = {n: v.decode(errors="replace") for n, v in zip(_FIELDS, values, strict=True) if v is not None}
            since = said.get({"waiting": "enqueued_at", "running": "started_at", "failed": "ended_at"}[state])
            views.append(
                JobView(
                    model=card_id,
                    id=job,
                    state=state,
                    lane=_RETURNED if returned else said.get("lane", ""),
                    client=said.get("client", ""),
                    position=position,
                    seconds=max(now - utcparse(since).timestamp(), 0.0) if since else 0.0,
                    worker=said.get("worker_name", ""),
                    error=_reason(job, last) if state == "failed" else "",
                )
            )
        return views

    async def _found(self, job: str) -> tuple[str, str, str]:
        """Id, card id and rq's status of a job."""
        fields = await self._redis.hmget(JOB_PREFIX + job, "origin", "status")
        if fields[0] is None:
            ids = (
                {view.id for view in await self.jobs(limit=1000) if view.id.startswith(job)} if len(job) > 3 else set()
            )
            if len(ids) != 1:
                raise InvalidJob("id", f"{len(ids)} jobs begin with {job!r}", "the id of a job in `lenspool queue`")
            (job,) = ids
            fields = await self._redis.hmget(JOB_PREFIX + job, "origin", "status")
        origin, state = ((value or b"").decode(errors="replace") for value in fields)
        if not origin.startswith(keys.queue_name("")):
            raise InvalidJob("id", f"{job} is no job of lenspool", "the id of a job in `lenspool queue`")
        return job, origin.removeprefix(keys.queue_name("")), state


def _reason(job: str, last: list[tuple[bytes, Mapping[bytes, bytes]]]) -> str:
    flat = [part for pair in last[0][1].items() for part in pair] if last else []
    return str(error_of(job, "failed", result_of(job, flat)[1]))
