"""Between job documents and rq's keys: what SUBMIT is called with, and what the keys of an ended job say.

rq's own code builds the job's hash, on a connection that cannot be used, so that no copy of its private format is kept
here; `redis.asyncio` sends it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import redis
from rq.command import PUBSUB_CHANNEL_TEMPLATE
from rq.job import Retry
from rq.results import Result
from rq.scripts import _build_hset_args

from lenspool import keys
from lenspool.errors import InvalidJob, JobCancelled, LenspoolError, PoolUnavailable, QueueFull, WorkerLost, from_wire
from lenspool.rq_json import (
    FAILURE_TTL,
    JOB_FUNCTION,
    LOSSES,
    MAX_DOCUMENT_BYTES,
    RESULT_TTL,
    RUN_TIMEOUT,
    JsonJob,
    JsonQueue,
    StrictJSON,
    UnreadableJob,
)
from lenspool.terms import Terms
from lenspool_cache.keys import canonical_json

log = logging.getLogger(__name__)

QUEUE_PREFIX = JsonQueue.redis_queue_namespace_prefix
JOB_PREFIX = JsonJob.redis_job_namespace_prefix
RESULT_PREFIX = Result.get_key("")
CHANNEL_PREFIX = PUBSUB_CHANNEL_TEMPLATE % ""

Call = tuple[list[str], list[Any]]
"""KEYS and ARGV of a script."""

_RAW_BYTES = 1024
_HEAD = b'["%s",null,[' % JOB_FUNCTION.encode()


class Submission(NamedTuple):
    """A job to submit: its id, its document in canonical bytes, whether it is to run anew, and its trace context."""

    id: str
    document: bytes
    fresh: bool = False
    trace: str = ""


class _Offline(redis.Redis):
    """Lets rq build commands; sends none."""

    def execute_command(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"rq tried to send {args[0]}")


class Submissions:
    """Builds the calls of one client."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._offline = _Offline()
        self._queues: dict[str, JsonQueue] = {}
        self._retry = Retry(max=LOSSES, enqueue_at_front=True)

    def _queue(self, card_id: str) -> JsonQueue:
        queue = self._queues.get(card_id)
        if queue is None:
            queue = self._queues[card_id] = JsonQueue(keys.queue_name(card_id), connection=self._offline)
        return queue

    def submit(self, card_id: str, terms: Terms, jobs: Sequence[Submission], *, kept: bool = False) -> Call:
        """Call of SUBMIT for jobs on the same terms; a kept job waits for no client, and is not cancelled."""
        queue = self._queue(card_id)
        touched = [
            queue.redis_queues_keys,
            queue.failed_job_registry.key,
            queue.canceled_job_registry.key,
            queue.finished_job_registry.key,
            queue.redis_queue_namespace_prefix + keys.lane_name(card_id, terms.lane, self._client_id),
            keys.ring(card_id),
            keys.turn(card_id),
            keys.queued(card_id),
        ]
        fields = self._fields(queue, terms)
        arguments = [
            keys.KEPT if kept else self._client_id,
            keys.WAITERS_TTL,
            terms.lane,
            self._client_id,
            -1 if terms.follow else terms.queue_timeout or 0,
            keys.work(card_id),
            keys.limits(card_id),
            JOB_PREFIX,
            keys.waiters(""),
            RESULT_PREFIX,
            len(fields) // 2,
            *fields,
        ]
        for job in jobs:
            arguments += (job.id, int(job.fresh), _packed(job.document), job.trace)
        return touched, arguments

    def _fields(self, queue: JsonQueue, terms: Terms) -> list[Any]:
        """Names and values of a new job's hash, but for its data: the same for all jobs that leave together."""
        job = queue.create_job(
            JOB_FUNCTION,
            description=JOB_FUNCTION,
            timeout=run_timeout(terms.run_timeout),
            result_ttl=RESULT_TTL,
            failure_ttl=FAILURE_TTL,
            retry=self._retry,
        )
        queue._prepare_for_queue(job)
        flat = _build_hset_args(job)
        said = [pair for pair in zip(flat[::2], flat[1::2], strict=True) if pair[0] != "data" and pair[1] != ""]
        return [part for pair in said for part in pair]

    def document(self, job_id: str, fields: Mapping[bytes, bytes]) -> dict[str, Any]:
        """The document that a job's hash holds.

        Raises
        ------
        InvalidJob
            The hash is not that of a job of lenspool.
        """
        job = JsonJob(job_id, connection=self._offline)
        try:
            job.restore(fields)
        except UnreadableJob as error:
            raise InvalidJob("id", str(error), "a job of this pool") from None
        return job.document()

    def cancel(self, job_id: str, card_id: str, *, kept: bool = False) -> Call:
        """Call of CANCEL."""
        queue = self._queue(card_id)
        prefix = queue.redis_queue_namespace_prefix
        touched = [
            JOB_PREFIX + job_id,
            keys.waiters(job_id),
            queue.canceled_job_registry.key,
            keys.ring(card_id),
            queue.redis_queues_keys,
            queue.key,
            prefix + keys.suspects_name(card_id),
            prefix + keys.alone_name(card_id),
        ]
        return touched, [job_id, keys.KEPT if kept else self._client_id, RESULT_TTL, CHANNEL_PREFIX]


def encode(document: Mapping[str, Any]) -> tuple[str, bytes]:
    """Id and canonical bytes of a job document.

    Raises
    ------
    InvalidJob
        The document is no JSON, or larger than `MAX_DOCUMENT_BYTES`.
    """
    try:
        data = canonical_json(document)
    except (TypeError, ValueError) as error:
        raise InvalidJob("document", str(error), "finite numbers, strings, lists and objects") from None
    if len(data) > MAX_DOCUMENT_BYTES:
        raise InvalidJob("document", f"has {len(data)} bytes", f"at most {MAX_DOCUMENT_BYTES}")
    return hashlib.sha256(data).hexdigest()[:40], data


def _packed(document: bytes) -> bytes:
    """A job's data as rq reads it: compressed, or not, which is better for what is small."""
    data = _HEAD + document + b"],{}]"
    return data if len(data) < _RAW_BYTES else zlib.compress(data, 1)


def run_timeout(timeout: float | None) -> int:
    """The run limit in rq's whole seconds."""
    return RUN_TIMEOUT if timeout is None else max(1, math.ceil(timeout))


def refuse(reply: Sequence[Any], job_id: str) -> None:
    """Raise what SUBMIT's reply says against the job.

    Raises
    ------
    QueueFull
    PoolUnavailable
        Redis refuses it.
    """
    if reply[0] == b"full":
        raise QueueFull(reply[1], reply[2].decode(), job_id=job_id)
    if reply[0] == b"error":
        raise PoolUnavailable(f"Redis refuses the job: {reply[1].decode(errors='replace')}", job_id=job_id)


def result_of(job_id: str, fields: Sequence[bytes]) -> tuple[Any, str]:
    """Return value and error text from the flat list of an rq result's stream entry; None and "" for what is not there.

    Never raises: what someone else wrote there must not end the wait for other jobs.
    """
    if not fields:
        return None, ""
    try:
        payload = dict(zip(fields[::2], fields[1::2], strict=True))
        result = Result.restore(job_id, "0-0", payload, connection=None, serializer=StrictJSON)
    except Exception as error:
        log.warning("the result of job %s is unreadable: %s", job_id, error)
        return None, "the result in Redis is unreadable"
    return result.return_value, result.exc_string or ""


def error_of(job_id: str, state: str, text: str) -> LenspoolError:
    """The error of a job that ended in `state` (failed, stopped, canceled) with `text` as rq keeps it."""
    if state != "failed":
        return JobCancelled("the job was cancelled", job_id=job_id)
    if "AbandonedJobError" in text:  # rq's own clean-up, run by any process, gave the job up
        return WorkerLost(LOSSES + 1, job_id=job_id)
    return from_wire(text, job_id)
