"""Positions mean the same token however they are written, and nothing is dropped in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lenspool import InvalidJob
from lenspool.positions import in_phase, resolve


@pytest.mark.parametrize(
    ("positions", "capture", "generation"),
    [
        ("all", [(0, 10)], [(0, None)]),
        ("prompt", [(0, 10)], [(0, 10)]),
        ("last", [(9, 10)], [(9, 10)]),
        (-1, [(9, 10)], [(9, 10)]),
        (np.int64(3), [(3, 4)], [(3, 4)]),
        ([0, 1, 2, 7, 7, -1], [(0, 3), (7, 8), (9, 10)], [(0, 3), (7, 8), (9, 10)]),
        (np.array([4, 5]), [(4, 6)], [(4, 6)]),
        (range(2, 5), [(2, 5)], [(2, 5)]),
        (slice(-3, None), [(7, 10)], [(7, 10)]),
        (slice(0, 10, 5), [(0, 1), (5, 6)], [(0, 1), (5, 6)]),
    ],
)
def test_forms(positions: Any, capture: Any, generation: Any) -> None:
    assert resolve(positions, 10, generating=False) == capture
    assert resolve(positions, 10, generating=True) == generation


def test_generated_reaches_to_the_end() -> None:
    assert resolve("generated", 10, generating=True) == [(10, None)]


@pytest.mark.parametrize("bad", [[], slice(5, 5), slice("a", "b"), 10, -11, [3, 10], True, [True], 1.5, "first", None])
def test_empty_out_of_range_and_other_types_are_errors(bad: Any) -> None:
    with pytest.raises(InvalidJob) as error:
        resolve(bad, 10, generating=False)
    assert error.value.field == "positions"


def test_generated_in_a_capture_is_an_error() -> None:
    with pytest.raises(InvalidJob):
        resolve("generated", 10, generating=False)


def test_phases_split_at_the_prompt() -> None:
    everything = resolve("all", 10, generating=True)
    assert in_phase(everything, "all", 10) == [(0, None)]
    assert in_phase(everything, "prompt", 10) == [(0, 10)]
    assert in_phase(everything, "generated", 10) == [(10, None)]
    with pytest.raises(InvalidJob, match="no selected position"):
        in_phase([(3, 4)], "generated", 10)
    with pytest.raises(InvalidJob):
        in_phase(everything, "decode", 10)
