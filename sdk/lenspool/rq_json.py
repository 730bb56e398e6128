"""rq without code in its data: strict JSON, one function name, nothing imported or called by what Redis says.

Stock rq runs whatever it reads: its default serializer is pickle, and even with JSON a job names the function, the
callbacks and the URLs that the worker then calls. A `JsonJob` holds a JSON document and nothing else.

Operators: `rq info --queue-class lenspool.rq_json.JsonQueue`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

from rq import Queue
from rq.exceptions import NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import FinishedJobRegistry, StartedJobRegistry
from rq.utils import utcformat

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


class UnreadableJob(NoSuchJobError):
    """A job's hash is not one that rq wrote. As rq's own error for a missing job it never stops a clean-up."""


class StrictJSON:
    """Serializer for rq: JSON, without NaN and Infinity."""

    @staticmethod
    def dumps(obj: Any, /) -> bytes:
        """Serialise; ValueError for numbers that are not finite, TypeError for what is not JSON."""
        return json.dumps(obj, separators=(",", ":"), allow_nan=False).encode()

    @staticmethod
    def loads(data: bytes, /) -> Any:
        """Parse; ValueError for anything but strict JSON."""
        return json.loads(data, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class JsonJob(Job):
    """An rq job that holds one JSON document.

    Attributes
    ----------
    refused
        Names of fields in its hash that a lenspool job must not have; `document` fails when there are any.
    stored
        Redis has its hash: a run that succeeded writes only what changed.
    home
        Its queue, whose registries it then uses: rq makes new ones, dearly, at each use.
    """

    refused: tuple[str, ...] = ()
    stored: bool = False
    home: Queue | None = None

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None) -> None:
        super().__init__(id, connection=connection, serializer=serializer or StrictJSON)

    @property
    def func(self) -> NoReturn:
        """Never resolved: stock rq would import what the name says."""
        raise InvalidJob("job", "jobs of this pool have no callable")

    # rq imports and calls these by name
    success_callback = failure_callback = stopped_callback = property(lambda self: None)

    @property
    def started_job_registry(self) -> StartedJobRegistry:
        return super().started_job_registry if self.home is None else self.home.started_job_registry

    @property
    def finished_job_registry(self) -> FinishedJobRegistry:
        return super().finished_job_registry if self.home is None else self.home.finished_job_registry

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

    def save(self, pipeline: Any = None, include_meta: bool = True, include_result: bool = True) -> None:
        """Write the hash; of a job that has just finished the end alone, as rq would compress all of it again."""
        if self.stored and pipeline is not None and self.get_status(refresh=False) == JobStatus.FINISHED:
            pipeline.hset(self.key, "ended_at", utcformat(self.ended_at))
        else:
            super().save(pipeline, include_meta, include_result)

    def document(self) -> dict[str, Any]:
        """The job document, once the job is seen to be of the one kind that lenspool runs.

        Raises
        ------
        InvalidJob
            Another function, callbacks, webhooks, other arguments, or no JSON.
        """
        if self.refused:
            raise InvalidJob("job", f"has {', '.join(self.refused)}", "a plain job")
        try:
            function, instance, args, kwargs = StrictJSON.loads(self.data)
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
