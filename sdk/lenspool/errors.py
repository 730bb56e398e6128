"""Every error that lenspool raises on purpose.

::

    LenspoolError                       .job_id  .retryable
    ├── InvalidJob                      .field .reason .allowed; refused before anything is queued
    │   ├── UnknownHook                 .name .nearest
    │   ├── UnsupportedHook             .name .reason
    │   └── UnknownModel                .name .available
    ├── DeadlineExceeded                .stage = "queue" | "run"
    ├── JobCancelled
    ├── PoolUnavailable                 broker down, or no live worker for the model
    ├── QueueFull                       .limit .scope
    ├── WorkerLost                      .attempts
    ├── EngineFailed                    .detail
    └── CacheError
        ├── CacheMiss                   .name .detail; rows that were evicted
        ├── CacheCorrupt                .key
        └── CacheFull                   .path .needed
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lenspool_cache.errors import CacheCorrupt, CacheError, CacheFull, CacheMiss, LenspoolError

__all__ = [
    "CacheCorrupt",
    "CacheError",
    "CacheFull",
    "CacheMiss",
    "DeadlineExceeded",
    "EngineFailed",
    "InvalidJob",
    "JobCancelled",
    "LenspoolError",
    "PoolUnavailable",
    "QueueFull",
    "UnknownHook",
    "UnknownModel",
    "UnsupportedHook",
    "WorkerLost",
    "from_wire",
    "to_wire",
]


class InvalidJob(LenspoolError):
    """The request itself is wrong. Checked by the client before queueing and once more by the worker.

    Attributes
    ----------
    field
        The argument at fault, e.g. `"positions"` or `"interventions[0].value"`.
    reason
        What is wrong with it.
    allowed
        What would be accepted, in words; empty when `reason` says it all.
    """

    def __init__(self, field: str, reason: str, allowed: str = "", *, job_id: str | None = None) -> None:
        super().__init__(f"{field}: {reason}" + (f" (allowed: {allowed})" if allowed else ""), job_id=job_id)
        self.field = field
        self.reason = reason
        self.allowed = allowed


class UnknownHook(InvalidJob):
    """No hook has this name, and no hook matches this pattern."""

    def __init__(
        self, name: str, nearest: Sequence[str] = (), *, field: str = "hooks", job_id: str | None = None
    ) -> None:
        hint = "nearest: " + ", ".join(nearest) if nearest else "see `lenspool hooks`"
        super().__init__(field, f"unknown hook {name!r}", hint, job_id=job_id)
        self.name = name
        self.nearest = list(nearest)


class UnsupportedHook(InvalidJob):
    """The hook exists in the vocabulary, but this model or engine cannot serve it."""

    def __init__(self, name: str, reason: str, *, field: str = "hooks", job_id: str | None = None) -> None:
        super().__init__(field, f"{name!r} cannot be served: {reason}", job_id=job_id)
        self.name = name
        self.reason = reason


class UnknownModel(InvalidJob):
    """No worker serves this model."""

    def __init__(self, name: str, available: Sequence[str] = (), *, job_id: str | None = None) -> None:
        super().__init__(
            "model", f"no worker serves {name!r}", ", ".join(available) or "nothing is served now", job_id=job_id
        )
        self.name = name
        self.available = list(available)


class DeadlineExceeded(LenspoolError):
    """The job waited in the queue, or ran, for longer than its caller allowed."""

    retryable = True

    def __init__(self, stage: str, seconds: float, *, job_id: str | None = None) -> None:
        super().__init__(f"deadline exceeded after {seconds:g} s (stage: {stage})", job_id=job_id)
        self.stage = stage
        self.seconds = seconds


class JobCancelled(LenspoolError):
    """The job was cancelled by a person or a program."""

    retryable = True


class PoolUnavailable(LenspoolError):
    """The broker cannot be reached, or no live worker serves the model."""

    retryable = True


class QueueFull(LenspoolError):
    """No more jobs may wait.

    Attributes
    ----------
    limit
        The most jobs that may wait.
    scope
        `"client"`: the limit is that of one client in one lane; `"model"`: of all clients of the model together.
    """

    retryable = True

    def __init__(self, limit: int, scope: str = "model", *, job_id: str | None = None) -> None:
        super().__init__(f"the queue is full: at most {limit} jobs may wait per {scope}", job_id=job_id)
        self.limit = limit
        self.scope = scope


class WorkerLost(LenspoolError):
    """Each worker that took the job died or stalled; it is not tried again."""

    retryable = True

    def __init__(self, attempts: int, *, job_id: str | None = None) -> None:
        super().__init__(f"the worker was lost {attempts} times while running this job", job_id=job_id)
        self.attempts = attempts


class EngineFailed(LenspoolError):
    """The engine could not run the job, or its rows were not what was asked for."""

    def __init__(self, detail: str, *, job_id: str | None = None) -> None:
        super().__init__(detail, job_id=job_id)
        self.detail = detail


_FIELDS: dict[type[LenspoolError], tuple[str, ...]] = {
    InvalidJob: ("field", "reason", "allowed"),
    UnknownHook: ("name", "nearest"),
    UnsupportedHook: ("name", "reason"),
    UnknownModel: ("name", "available"),
    DeadlineExceeded: ("stage", "seconds"),
    QueueFull: ("limit", "scope"),
    WorkerLost: ("attempts",),
    EngineFailed: ("detail",),
    CacheCorrupt: ("key",),
    CacheFull: ("path", "needed"),
    CacheMiss: ("name", "detail"),
    JobCancelled: (),
    PoolUnavailable: (),
    CacheError: (),
    LenspoolError: (),
}
_BY_NAME = {cls.__name__: cls for cls in _FIELDS}


def to_wire(error: BaseException) -> str:
    """Serialise an error for its trip through Redis: type name, constructor fields, message."""
    cls = type(error) if type(error) in _FIELDS else LenspoolError
    fields = {name: getattr(error, name) for name in _FIELDS[cls]}  # type: ignore[index]
    message = str(error) if isinstance(error, LenspoolError) else f"{type(error).__name__}: {error}"
    return json.dumps({"error": cls.__name__, "fields": fields, "message": message})


def from_wire(text: str, job_id: str | None = None) -> LenspoolError:
    """Rebuild an error from `to_wire`; text of any other form becomes an `EngineFailed` that quotes it."""
    try:
        document: dict[str, Any] = json.loads(text)
        cls = _BY_NAME[document["error"]]
        if _FIELDS[cls]:
            return cls(**document["fields"], job_id=job_id)
        return cls(document["message"], job_id=job_id)
    except (ValueError, KeyError, TypeError):
        return EngineFailed(text.strip().splitlines()[-1] if text.strip() else "no reason was given", job_id=job_id)
