"""Sampling arguments of a generation: checked, and in one canonical form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from lenspool.errors import InvalidJob


def sampling_document(
    *,
    max_tokens: int = 16,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop: str | Iterable[str] = (),
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """Check sampling arguments and write them in canonical form; greedy sampling drops what it does not use.

    Raises
    ------
    InvalidJob
        A value is of a wrong type or out of range.
    """
    check_integer("max_tokens", max_tokens, 1, None)
    check_real("temperature", temperature, 0.0, 100.0)
    check_real("top_p", top_p, 0.0, 1.0, above=True)
    check_integer("top_k", top_k, 0, None)
    if seed is not None:
        check_integer("seed", seed, 0, 2**63 - 1)
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(s, str) and s for s in stops):
        raise InvalidJob("stop", f"got {stop!r}", "a non-empty string or a list of them")
    if not isinstance(ignore_eos, bool):
        raise InvalidJob("ignore_eos", f"got {ignore_eos!r}", "True or False")
    greedy = temperature == 0
    return {
        "max_tokens": int(max_tokens),
        "temperature": float(temperature) + 0.0,
        "top_p": 1.0 if greedy else float(top_p),
        "top_k": 0 if greedy else int(top_k),
        "seed": None if greedy or seed is None else int(seed),
        "stop": sorted(set(stops)),
        "ignore_eos": ignore_eos,
    }


def check_integer(field: str, value: Any, low: int, high: int | None) -> None:
    allowed = f"an int from {low}" + (f" to {high}" if high is not None else " up")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidJob(field, f"got {value!r}", allowed)
    if value < low or (high is not None and value > high):
        raise InvalidJob(field, f"got {value}", allowed)


def check_real(field: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    allowed = f"a number {'above' if above else 'from'} {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidJob(field, f"got {value!r}", allowed)
    if not math.isfinite(value) or value > high or value < low or (above and value == low):
        raise InvalidJob(field, f"got {value}", allowed)
