"""Keys: the order of fields does not matter, everything else does."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenspool_cache.keys import Run, array_digest, canonical_json, entry_key

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    scalars | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(st.text(max_size=8), values, min_size=1, max_size=6)


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(v) for v in value] if isinstance(value, list) else value


@given(documents)
def test_field_order_does_not_matter(document: dict[str, Any]) -> None:
    one, two = Run(document), Run(reordered(document))
    assert one.data == two.data
    assert one.key == two.key
    assert one.entry("h") == two.entry("h")


@given(documents, st.data())
def test_any_change_changes_the_key(document: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(document)
    field = data.draw(st.sampled_from(sorted(document)))
    kind = data.draw(st.sampled_from(["replace", "remove", "rename", "wrap", "add"]))
    if kind == "replace":
        changed[field] = data.draw(values.filter(lambda v: canonical_json(v) != canonical_json(document[field])))
    elif kind == "remove":
        del changed[field]
    elif kind == "rename":
        changed[field + "x" * 9] = changed.pop(field)
    elif kind == "wrap":
        changed[field] = [changed[field]]
    else:
        changed["x" * 9] = None
    assert Run(changed).key != Run(document).key


def test_lists_keep_their_order() -> None:
    assert Run({"tokens": [1, 2]}).key != Run({"tokens": [2, 1]}).key


@given(st.text(max_size=20), st.text(max_size=20))
def test_entries_of_a_run(a: str, b: str) -> None:
    run = Run({"v": 1})
    assert (run.entry(a) == run.entry(b)) == (a == b)
    assert entry_key(run.data, a) == run.entry(a)
    assert len(run.entry(a)) == len(run.key) == 32


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_only_finite_numbers(bad: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"factor": [bad]})


def test_array_digest_sees_dtype_shape_and_bits() -> None:
    base = np.zeros((2, 6), np.float32)
    others = [
        base.reshape(3, 4),
        base.reshape(12),
        base.view(np.int32),
        base.astype(np.float64),
        np.zeros((2, 6), np.float16),
        np.zeros((2, 6), ml_dtypes.bfloat16),
        np.where(np.arange(12).reshape(2, 6) == 5, np.float32(-0.0), base),
        np.zeros((0, 6), np.float32),
        np.zeros((0, 7), np.float32),
    ]
    digests = [array_digest(a) for a in [base, *others]]
    assert len(set(digests)) == len(digests)
    assert array_digest(np.asfortranarray(base)) == array_digest(base.copy()) == digests[0]
