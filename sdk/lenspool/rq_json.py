"""rq without code in its data: strict JSON, one function name, nothing imported or called by what Redis says.

Stock rq runs whatever it reads: its default serializer is pickle, and even with JSON a job names the function, the
callbacks and the URLs that the worker then calls. A `JsonJob` holds a JSON document and nothing else.

Operators: `rq info --queue-class lenspool.rq_json.JsonQueue`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job

from lenspool.errors import InvalidJob

JOB_FUNCTION = "lenspool_worker.jobs.run"
MAX_DOCUMENT_BYTES = 8_000_000
LOSSES = 2
"""A job may lose its worker this often and is still tried again."""
RUN_TIMEOUT = 3600
"""Seconds that a run may take when its client sets no limit: a wedged run must not be waited for forever."""
RESULT_TTL = 600
FAILURE_TTL = 3600

_REFUSED = (
    "success_callback_name",
    "failure_callback_name",
    "stopped_callback_name",
    "webhooks",
    "dependency_id",
    "dependency_ids",
    "group_id",
    "repeats_left",
    "repeat_intervals",
    "rate_limit_key",
    "rate_limit_concurrency",
)
"""Fields of a job's hash that would make rq call, fetch or enqueue something else; lenspool never sets them."""


_TIME, _NUMBER, _NAME = rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z)?", rb"\d{0,9}", rb"[\x20-\x7e]*"
_OURS = {
    name.encode(): re.compile(pattern, re.DOTALL)
    for pattern, names in {
        rb".*": "data",
        rb"": " ".join(_REFUSED),
        _TIME: "created_at enqueued_at started_at ended_at last_heartbeat",
        _NUMBER: "timeout result_ttl failure_ttl retries_left number_of_retries enqueue_at_front_on_retry expires",
        rb"\[0\]": "retry_intervals",
        _NAME: "origin status description worker_name lane client place traceparent queue_timeout abandoned",
    }.items()
    for name in names.split()
}
"""Fields of the hashes that lenspool and rq write for its jobs, and what they may hold."""


class UnreadableJob(NoSuchJobError):
    """A job's hash is not one that rq wrote. As rq's own error for a missing job it never stops a clean-up."""


class StrictJSON:
    """Serializer for rq: JSON, without NaN and Infinity."""

    @staticmethod
    def dumps(obj: Any, /) -> bytes:
        """Serialise; ValueError for numbers that are not finite, TypeError for what is not JSON."""
        return _encode(obj).encode()

    @staticmethod
    def loads(data: bytes, /) -> Any:
        """Parse; ValueError for anything but strict JSON."""
        return _decode(data.decode())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=_no_constant).decode


class JsonJob(Job):
    """An rq job that holds one JSON document.

    Attributes
    ----------
    refused
        Names of fields in its hash that a lenspool job must not have; `document` fails when there are any.
    """

    refused: tuple[str, ...] = ()

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None) -> None:
        super().__init__(id, connection=connection, serializer=serializer or StrictJSON)

    @property
    def func(self) -> NoReturn:
        """Never resolved: stock rq would import what the name says."""
        raise InvalidJob("job", "jobs of this pool have no callable")

    # rq imports and calls these by name
    success_callback = failure_callback = stopped_callback = property(lambda self: None)

    def _execute(self) -> NoReturn:
        raise InvalidJob("job", "jobs of this pool run in a lenspool worker only")

    def restore(self, raw_data: Mapping[Any, Any]) -> None:
        """Fill the job from its hash.

        Raises
        ------
        UnreadableJob
            The hash is malformed or too large.
        """
        fields = {_text(name): value for name, value in raw_data.items()}
        self.refused = tuple(name for name in _REFUSED if fields.pop(name, None))
        for name in ("result", "exc_info"):  # rq keeps both in the result stream; here it inflates them without bound
            fields.pop(name, None)
        try:
            fields["data"] = _inflate(fields["data"])
            super().restore({name.encode(): value for name, value in fields.items()})
        except Exception as error:
            raise UnreadableJob(f"job {self.id}: {type(error).__name__}: {error}") from error
        self.result_ttl, self.failure_ttl = RESULT_TTL, FAILURE_TTL

    def document(self) -> dict[str, Any]:
        """The job document, once the job is seen to be of the one kind that lenspool runs.

        Raises
        ------
        InvalidJob
            Another function, callbacks, webhooks, other arguments, or no JSON.
        """
        if self.refused:
            raise InvalidJob("job", f"has {', '.join(self.refused)}", "a plain job")
        return document_of(self.data)


def read(fields: Mapping[bytes, bytes], origin: str, connection: Any) -> dict[str, Any]:
    """The document in a job's hash, as `JsonJob` reads it, at a fraction of the price.

    Parameters
    ----------
    fields
        The hash.
    origin
        Name of the queue that it must be of.
    connection
        As rq wants one; it is not used.

    Raises
    ------
    UnreadableJob, InvalidJob
        As `JsonJob.restore` and `JsonJob.document`.
    """
    if not _plain(fields):
        job = JsonJob("unread", connection=connection)
        job.restore(fields)
        document, of = job.document(), job.origin
    else:
        try:
            data = _inflate(fields[b"data"])
        except (ValueError, zlib.error) as error:
            raise UnreadableJob(str(error)) from error
        document, of = document_of(data), fields[b"origin"].decode()
    if of != origin:
        raise InvalidJob("job", f"was made for the queue {of[:100]!r}", origin)
    return document


def _plain(fields: Mapping[bytes, bytes]) -> bool:
    """Whether rq can read all of a hash, for all that can be seen at a glance."""
    return (
        fields.keys() <= _OURS.keys()
        and b"data" in fields
        and b"origin" in fields
        and all(_OURS[name].fullmatch(value) for name, value in fields.items())
    )


def document_of(data: bytes) -> dict[str, Any]:
    """The document in a job's data, once it is seen to be of the one kind that lenspool runs.

    Raises
    ------
    InvalidJob
        Another function, other arguments, or no JSON.
    """
    try:
        function, instance, args, kwargs = StrictJSON.loads(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidJob("job", f"is not JSON of the expected form: {str(error)[:200]}") from None
    if function != JOB_FUNCTION or instance is not None:
        raise InvalidJob("job", f"function {str(function)[:100]!r} is not served", JOB_FUNCTION)
    if kwargs or not isinstance(args, list) or len(args) != 1 or not isinstance(args[0], dict):
        raise InvalidJob("job", "wrong arguments", "one job document")
    document: dict[str, Any] = args[0]
    return document


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _inflate(data: bytes) -> bytes:
    """Undo rq's compression, up to the size limit; rq itself would inflate a few kilobytes to gigabytes."""
    if data[:1] != b"[":
        inflater = zlib.decompressobj()
        data = inflater.decompress(data, MAX_DOCUMENT_BYTES + 1024)
        if inflater.unconsumed_tail:
            raise ValueError(f"more than {MAX_DOCUMENT_BYTES} bytes")
        if data[:1] != b"[":  # could be a second compressed layer, which rq would inflate
            raise ValueError("not a JSON array")
    return data


class JsonQueue(Queue):
    """An rq queue of `JsonJob`s."""

    job_class = JsonJob

    def __init__(self, name: str = "default", connection: Any = None, **options: Any) -> None:
        options |= {"serializer": StrictJSON, "job_class": JsonJob}
        super().__init__(name, connection=connection, **options)
        # a version that can do everything: rq would ask the server with each new queue object
        self.redis_server_version = (7, 2, 0)
