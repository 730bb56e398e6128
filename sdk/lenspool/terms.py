"""On what terms a job waits and runs. They are no part of its content: equal jobs on other terms are one job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lenspool.errors import InvalidJob

Priority = Literal["interactive", "batch"]
"""`interactive` is for someone who waits, `batch` for what takes its time: it gets the smaller share, never none."""

PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""Jobs of each wait in a lane of that name."""


@dataclass(frozen=True)
class Terms:
    """Terms of one job.

    Attributes
    ----------
    lane
        Where it waits: the lane of its priority.
    queue_timeout, run_timeout
        Seconds that it may wait, and run; None sets no limit of the caller's own.
    follow
        Take the job on the terms that it has: a limit of another caller is one of this caller, too.
    trace
        Trace context (`traceparent`) of who asks; a job keeps that of who asked first.
    """

    lane: Priority = "interactive"
    queue_timeout: float | None = None
    run_timeout: float | None = None
    follow: bool = False
    trace: str = ""

    def __post_init__(self) -> None:
        check_priority(self.lane)
        for name in ("queue_timeout", "run_timeout"):
            check_seconds(name, getattr(self, name))

    def joined(self, other: Terms) -> Terms:
        """Terms of a job that two callers wait for: the better lane, and the longer limits."""
        return Terms(
            "interactive" if "interactive" in (self.lane, other.lane) else "batch",
            _longer(self.queue_timeout, other.queue_timeout),
            _longer(self.run_timeout, other.run_timeout),
            self.follow and other.follow,
            self.trace,
        )


def check_priority(value: Any) -> None:
    """Refuse a priority that there is not.

    Raises
    ------
    InvalidJob
        Naming those that there are.
    """
    if value not in PRIORITIES:
        raise InvalidJob("priority", f"got {value!r}", ", ".join(PRIORITIES))


def check_seconds(name: str, value: float | None) -> None:
    """Refuse a limit that is no positive number.

    Raises
    ------
    InvalidJob
        Naming the argument.
    """
    if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise InvalidJob(name, f"got {value!r}", "seconds above 0, or None")


def _longer(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)
