"""The arguments of a client's calls, each declared once; `lenspool.client` has them too."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np

from lenspool.interventions import Intervention
from lenspool.job import Reuse, check_reuse
from lenspool.readouts import Readout
from lenspool.sampling import Sampling, check_integer
from lenspool.terms import Priority, Terms, check_seconds

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""Text, chat messages, or token ids (taken verbatim)."""

Hooks = str | Readout | Iterable[str | Readout]
"""What to capture: names, aliases, short forms, globs, and readouts."""

Interventions = Intervention | Iterable[Intervention] | None


class _Run(TypedDict, total=False):
    positions: Any
    interventions: Interventions


class _Limits(TypedDict, total=False):
    priority: Priority
    queue_timeout: float | None
    run_timeout: float | None
    retries: int
    reuse: Reuse


class _Wait(TypedDict, total=False):
    timeout: float | None


class Options(_Limits, _Wait, total=False):
    """What every call of a client takes, and `Client.with_options` sets for all calls of a view.

    Attributes
    ----------
    priority
        `"interactive"`, the default but for `map` and `dataset`, or `"batch"` for what takes its time: such jobs let
        others pass.
    timeout, queue_timeout, run_timeout
        Seconds for everything, until the job is started, and for its run. Then `DeadlineExceeded`, whose `stage` says
        where the job stood. None, the default, waits as long as the pool lives.
    retries
        How often the call is made again after `PoolUnavailable`, `QueueFull` or `WorkerLost`, with growing pauses,
        within `timeout`. Default 0. (A job that loses its worker is tried again by the pool itself before that.)
    reuse
        `"prefix"`, the default: rows that follow from the tokens and edits up to them may be those of any run that
        begins alike. `"none"`: the run stands alone, and was or is computed in one piece.
    """


class SubmitOptions(_Run, _Limits, total=False):
    """Arguments of `Client.submit_capture`: those of `CaptureOptions` but `timeout`."""


class CaptureOptions(_Run, _Limits, _Wait, total=False):
    """Arguments of `Client.capture`: those of `Options`, and what follows.

    Attributes
    ----------
    positions
        `"all"` (the default), `"last"`, an int, a list of ints, a slice, or `at("Paris")`; see `lenspool.positions`.
    interventions
        Edits made during the run; captures show the edited values.
    """


class SubmitGenerateOptions(_Run, _Limits, Sampling, total=False):
    """Arguments of `Client.submit_generate`: those of `GenerateOptions` but `timeout`."""

    hooks: Hooks


class GenerateOptions(_Run, _Limits, _Wait, Sampling, total=False):
    """Arguments of `Client.generate`: those of `CaptureOptions` and `Sampling`, and what follows.

    Attributes
    ----------
    hooks
        What to capture; default nothing.
    positions
        Also `"prompt"` and `"generated"`; `"all"` is both. The row of position p is the one from which token p+1 is
        predicted, so the first generated token is predicted by the prompt's last row.
    """

    hooks: Hooks


class ManyOptions(CaptureOptions, total=False):
    """Arguments of `Client.map` and `Client.as_completed`: those of `CaptureOptions` for each, and what follows.

    Attributes
    ----------
    concurrency
        Most captures that are in flight or have not been taken; default 256.
    return_exceptions
        Let an error take its result's place; default it is raised and the rest is cancelled.
    progress
        Show a bar, in a terminal (on stderr) or notebook only.
    """

    concurrency: int
    return_exceptions: bool
    progress: bool


class Manner(NamedTuple):
    """How one call waits."""

    terms: Terms
    timeout: float | None
    retries: int


def check_names(call: str, given: Mapping[str, Any], allowed: Any) -> None:
    """Refuse arguments that a call does not have.

    Raises
    ------
    TypeError
        Naming the argument, what is nearest, and what there is.
    """
    names = list(allowed.__annotations__)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{call}() has no argument {name!r}{hint} (it has {', '.join(sorted(names))})")


def manner(options: Mapping[str, Any]) -> Manner:
    """How a call with these options waits.

    Raises
    ------
    InvalidJob
        An option has a value that it may not have.
    """
    timeout = options.get("timeout")
    check_seconds("timeout", timeout)
    check_reuse(options.get("reuse", "prefix"))
    terms = Terms(options.get("priority", "interactive"), options.get("queue_timeout"), options.get("run_timeout"))
    return Manner(terms, timeout, check_integer("retries", options.get("retries", 0), 0, None))


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """Those of a call's options that are arguments of sampling."""
    return cast(Sampling, {name: value for name, value in options.items() if name in Sampling.__annotations__})
