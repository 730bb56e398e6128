"""Every word of the interventions: what it writes into the job, and how it refuses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from lenspool import (
    ArrayRef,
    Capture,
    Intervention,
    InvalidJob,
    ModelCard,
    UnsupportedHook,
    add,
    clamp,
    interpolate,
    mean_ablate,
    patch,
    project_out,
    scale,
    set_,
    steer,
    suppress,
    swap_rows,
    zero,
)
from lenspool.card import HookInfo
from lenspool.edit_documents import to_documents
from lenspool.edit_forms import FORMS, check_array, check_edits
from lenspool_cache import canonical_json
from lenspool_cache.keys import array_digest

HOOK = "blocks.1.hook_resid_post"
Z = "blocks.0.attn.hook_z"
RESULT = "blocks.0.attn.hook_result"
POST = "blocks.0.mlp.hook_post"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
VECTOR = np.linspace(-1, 1, 16).astype(np.float32)
ROWS = np.arange(160, dtype=np.float32).reshape(10, 16)
HEAD = np.arange(1, 9, dtype=np.float32)


@pytest.fixture
def wide(card: ModelCard) -> ModelCard:
    heads = ("pos", "head", "d_head")
    extra = {
        Z: HookInfo(Z, 16, True, heads, (2, 8)),
        RESULT: HookInfo(RESULT, 32, False, ("pos", "head", "d_model"), (2, 16)),
        POST: HookInfo(POST, 32, True, ("pos", "d_mlp")),
    }
    return dataclasses.replace(card, hooks={**card.hooks, **extra})


def written(
    item: Intervention, card: ModelCard, *, generating: bool = False, **options: Any
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Documents and arrays; a worker accepts them."""
    documents, arrays = to_documents(item, card, TOKENS, generating=generating, **options)
    check_edits(documents, card.hooks, 20 if generating else 10, generating=generating)
    for document in documents:
        value = document.get("value")
        if isinstance(value, dict) and value["array"] in arrays:
            check_array(document, card.hooks[document["hook"]], arrays[value["array"]].shape, "value")
    return documents, arrays


def array(document: dict[str, Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    return arrays[document["value"]["array"]]


def capture(card: ModelCard, hook: str, rows: np.ndarray, positions: list[int]) -> Capture:
    return Capture(
        card,
        hooks=[hook],
        positions=np.array(positions),
        token_ids=TOKENS,
        tokens=None,
        reader=lambda name: rows,
        cached=True,
        provenance={},
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (suppress(HOOK), zero(HOOK)),
        (mean_ablate(HOOK, VECTOR), set_(HOOK, VECTOR)),
        (interpolate(HOOK, VECTOR, 1), set_(HOOK, VECTOR)),
        (steer(HOOK, VECTOR, norm=None, coefficient=2), add(HOOK, VECTOR, coefficient=2.0)),
        (patch(HOOK, ROWS), set_(HOOK, ROWS)),
        (patch(HOOK, ROWS[:2], positions=[7, 3]), set_(HOOK, ROWS[[1, 0]], positions=[3, 7])),
        (patch(HOOK, ROWS, source_positions=[5], positions=2), set_(HOOK, ROWS[5], positions=[2])),
        (patch(HOOK, ROWS, source_positions=slice(4, 6), positions=[0, 1]), set_(HOOK, ROWS[4:6], positions=[0, 1])),
        (patch(HOOK, VECTOR), set_(HOOK, VECTOR)),
        (zero(Z, heads=[1, 0]), zero(Z, units=range(16))),
        (zero(Z, heads=-1), zero(RESULT, heads=[1])),
        (scale(RESULT, 2.0, heads=0), scale(Z, 2, units=range(8))),
        (set_(Z, HEAD, heads=[0, 1]), set_(Z, np.concatenate([HEAD, HEAD]), units=range(16))),
        (set_(Z, np.stack([HEAD, -HEAD]), heads=[1, 0]), set_(Z, np.stack([-HEAD, HEAD]), heads=[0, 1])),
        (set_(POST, [1.0, 2.0], units=[9, 3]), set_(POST, [2.0, 1.0], units=[3, 9])),
        (zero(HOOK, where_token=1), zero(HOOK, positions=[1, 3])),
        (zero(HOOK, where_token=[5, 9, 77], phase="prompt"), zero(HOOK, positions=[4, 5, 8])),
    ],
)
def test_equal_meaning_equal_bytes(wide: ModelCard, one: Intervention, other: Intervention) -> None:
    first, second = written(one, wide), written(other, wide)
    assert canonical_json(first[0]) == canonical_json(second[0])
    assert first[1].keys() == second[1].keys()


def test_edits_stand_in_network_order_and_at_one_hook_as_given(wide: ModelCard) -> None:
    items = [zero("resid_post.3"), scale(HOOK, 2.0), add(Z, 1.0), zero(HOOK)]
    documents, _ = to_documents(items, wide, TOKENS, generating=False)
    assert [(d["hook"], d["op"]) for d in documents] == [
        (Z, "add"), (HOOK, "scale"), (HOOK, "zero"), ("blocks.3.hook_resid_post", "zero"),
    ]  # fmt: skip


def test_each_position_takes_its_own_row(wide: ModelCard) -> None:
    (document,), arrays = written(add(HOOK, ROWS[:3], positions=[8, 2, 5], coefficient=0.5), wide)
    assert document["ranges"] == [[2, 3], [5, 6], [8, 9]] and document["value"]["rows"] == [[0, 3]]
    assert np.array_equal(array(document, arrays), ROWS[[1, 2, 0]])
    ref = ArrayRef(array_digest(ROWS), ROWS.shape)
    (document,), arrays = written(patch(HOOK, ref, positions=[8, 2, 5], source_positions=[1, 6, 7]), wide)
    assert document["value"] == {"array": ref.digest, "rows": [[6, 8], [1, 2]]} and not arrays


def test_a_capture_gives_the_rows_of_the_same_positions(wide: ModelCard) -> None:
    source = capture(wide, Z, ROWS[:4], [2, 4, 6, 9])
    (document,), arrays = written(patch("z.0", source, positions=[9, 4], heads=1), wide)
    assert document["columns"] == [[8, 16]]
    assert np.array_equal(array(document, arrays), ROWS[[1, 3], 8:])
    (document,), arrays = written(patch("z.0", source, positions=[0, 1], source_positions=[-1, 2]), wide)
    assert np.array_equal(array(document, arrays), ROWS[[3, 0]])
    with pytest.raises(InvalidJob, match=r"no rows at \[3\]"):
        written(patch("z.0", source, positions=3), wide)
    with pytest.raises(InvalidJob, match="was not captured"):
        written(patch(HOOK, source, positions=2), wide)


def test_what_needs_a_direction_goes_head_by_head(wide: ModelCard) -> None:
    documents, arrays = written(clamp(Z, np.stack([HEAD, -HEAD]), heads=[1, 0], max=2), wide)
    assert [d["columns"] for d in documents] == [[[0, 8]], [[8, 16]]]
    assert np.array_equal(array(documents[0], arrays), -HEAD) and documents[0]["min"] is None
    documents, arrays = written(project_out(Z, np.eye(8)[:3], heads=[0, 1]), wide)
    assert len(documents) == 2 and array(documents[1], arrays).shape == (3, 8)
    (document,), arrays = written(project_out(HOOK, VECTOR), wide)
    assert array(document, arrays).shape == (1, 16)


def test_what_is_generated_is_bound_to_tokens_by_the_engine(wide: ModelCard) -> None:
    (document,), _ = written(zero(HOOK, where_token=[3]), wide, generating=True)
    assert document["ranges"] == [[0, 1], [9, None]] and document["tokens"] == [3]
    (document,), _ = written(zero(HOOK, where_token=[4, 11]), wide, generating=True)
    assert document["ranges"] == [[2, 3], [10, None]] and document["tokens"] == [4, 11]


def test_a_relative_dose_is_measured_by_the_norm_at_the_hook(wide: ModelCard) -> None:
    unit = VECTOR / np.linalg.norm(VECTOR)
    (document,), _ = written(add(HOOK, 3 * unit, relative=0.5), wide, norms={HOOK: 12.0})
    assert document["coefficient"] == pytest.approx(2.0, rel=1e-6)
    with pytest.raises(InvalidJob, match="not known"):
        written(add(HOOK, unit, relative=0.5), wide)


BAD = np.full(16, np.nan)
REFUSED: list[tuple[Intervention, str]] = [
    (scale(HOOK, True), "factor"),
    (scale(HOOK, None), "factor"),  # type: ignore[arg-type]
    (add(HOOK, "2"), "value"),
    (add(HOOK, lambda rows: rows), "value"),
    (add(HOOK, BAD), "value"),
    (add(HOOK, VECTOR[:15]), "value"),
    (add(HOOK, ROWS[:3], positions=[1, 2]), "value"),
    (add(HOOK, ROWS[:2], positions=[1, 1]), "value"),
    (add(HOOK, VECTOR, coefficient=float("inf")), "coefficient"),
    (add(HOOK, VECTOR, relative=0.5, coefficient=2.0), "relative"),
    (add(HOOK, 1.0, relative=0.5), "relative"),
    (steer(HOOK, VECTOR, norm="keep"), "norm"),  # type: ignore[arg-type]
    (steer(HOOK, 2.0), "value"),
    (steer(HOOK, VECTOR, norm="match", relative=1.0), "norm"),
    (steer(HOOK, VECTOR * 0, norm="match"), "value"),
    (project_out(HOOK, np.zeros((2, 16))), "value"),
    (project_out(HOOK, np.stack([VECTOR, VECTOR])), "value"),
    (project_out(HOOK, np.eye(17)[:, :16]), "value"),
    (clamp(HOOK, VECTOR), "min"),
    (clamp(HOOK, VECTOR, min=2, max=1), "min"),
    (clamp(HOOK, VECTOR * 0, min=2), "value"),
    (interpolate(HOOK, VECTOR, float("nan")), "alpha"),
    (patch(HOOK, ROWS[:4]), "value"),
    (patch(HOOK, ROWS, positions=1, source_positions=10), "value.source_positions"),
    (patch(HOOK, ROWS[:, :8]), "value"),
    (patch(HOOK, 3.0), "value"),
    (zero(HOOK, heads=0), "heads"),
    (zero(Z, heads=[]), "heads"),
    (zero(Z, heads=2), "heads"),
    (zero(Z, heads=[True]), "heads"),
    (zero(Z, heads=[0, -2]), "heads"),
    (zero(Z, heads=0, units=3), "units"),
    (zero(POST, units=32), "units"),
    (zero(HOOK, where_token=7), "where_token"),
    (zero(HOOK, where_token="Paris"), "where_token"),  # type: ignore[arg-type]
    (zero(HOOK, where_token=10**9), "where_token"),
    (zero(HOOK, positions=[True]), "positions"),
    (zero(HOOK, positions=[]), "positions"),
    (zero(HOOK, positions=-11), "positions"),
    (zero(HOOK, positions="generated"), "positions"),
    (zero(HOOK, phase="decode"), "phase"),
    (swap_rows(HOOK, 1, 2), "op"),
    (Intervention("multiply", HOOK), "op"),
]


@pytest.mark.parametrize(("item", "field"), REFUSED, ids=lambda value: re.sub(" at 0x.*", "", str(value))[:60])
def test_refusals_name_the_field(wide: ModelCard, item: Intervention, field: str) -> None:
    options = {"norms": {HOOK: 1.0}}
    with pytest.raises(InvalidJob) as error:
        to_documents(item, wide, TOKENS, generating=False, **options)
    assert error.value.field == f"interventions[0].{field}"


def test_unknown_words_are_refused(wide: ModelCard) -> None:
    with pytest.raises(InvalidJob, match="position"):
        to_documents(zero(HOOK, position=3), wide, TOKENS, generating=False)  # type: ignore[call-arg]


def test_a_head_result_is_only_zeroed_and_scaled(wide: ModelCard) -> None:
    with pytest.raises(UnsupportedHook, match="hook_attn_out"):
        to_documents(add(RESULT, 1.0, heads=0), wide, TOKENS, generating=False)


def test_an_intervention_prints_as_the_call_that_made_it() -> None:
    item = add(HOOK, VECTOR, coefficient=2.0, positions=[-1])
    assert repr(item) == f"add('{HOOK}', <ndarray [16]>, coefficient=2.0, positions=[-1])"
    assert repr(zero("z.3", heads=[1, 2])) == "zero('z.3', heads=[1, 2])"
    assert repr(add(HOOK, [0.0] * 16)) == f"add('{HOOK}', <16 items>, coefficient=1.0)"


GOOD: dict[str, Any] = {"hook": HOOK, "op": "add", "ranges": [[0, 3]], "coefficient": 1.0, "value": 2.0}
DIGEST = {"array": "0" * 64}


@pytest.mark.parametrize(
    "change",
    [
        {"op": "exec"},
        {"op": ["add"]},
        {"hook": "blocks.9.hook_resid_post"},
        {"hook": 3},
        {"hook": "unembed.hook_out"},
        {"ranges": [[0, 30]]},
        {"ranges": [[3, None]]},
        {"coefficient": 1},
        {"coefficient": float("nan")},
        {"value": "2"},
        {"value": None},
        {"value": {"array": "../etc/passwd"}},
        {"value": {**DIGEST, "path": "x"}},
        {"value": {**DIGEST, "rows": [[0, 2]]}},
        {"value": {**DIGEST, "rows": [[-1, 2]]}},
        {"value": {**DIGEST, "rows": [[0, 10**30]]}},
        {"value": {**DIGEST, "rows": "abc"}},
        {"columns": [[0, 17]]},
        {"columns": []},
        {"tokens": []},
        {"tokens": ["a"]},
        {"code": "import os"},
        {"op": "steer", "norm": "preserve"},
        {"op": "steer", "norm": "spin", "value": DIGEST},
        {"op": "project_out"},
    ],
)
def test_a_worker_refuses_documents_that_no_client_writes(wide: ModelCard, change: dict[str, Any]) -> None:
    check_edits([GOOD], wide.hooks, 10, generating=False)
    with pytest.raises(InvalidJob):
        check_edits([{**GOOD, **change}], wide.hooks, 10, generating=False)


@pytest.mark.parametrize(
    ("shape", "fits", "change"),
    [
        ((16,), True, {}),
        ((2, 8), False, {}),
        ((1, 16), False, {}),
        ((15,), False, {}),
        ((1, 17), False, {}),
        ((), False, {}),
        ((3, 16), True, {"value": {**DIGEST, "rows": [[0, 3]]}}),
        ((2, 16), False, {"value": {**DIGEST, "rows": [[0, 3]]}}),
        ((16,), False, {"value": {**DIGEST, "rows": [[0, 3]]}}),
        ((4,), True, {"columns": [[0, 4]]}),
        ((16,), True, {"columns": [[0, 4]]}),
        ((5,), False, {"columns": [[0, 4]]}),
        ((3, 16), True, {"op": "project_out"}),
        ((17, 16), False, {"op": "project_out"}),
        ((16,), True, {"op": "project_out"}),
        ((3, 16), False, {"op": "project_out", "columns": [[0, 4]]}),
        ((2, 8), True, {"hook": Z}),
        ((8, 2), False, {"hook": Z}),
        ((1, 8), True, {"hook": Z, "columns": [[0, 8]]}),
        ((3, 2, 8), True, {"hook": Z, "value": {**DIGEST, "rows": [[0, 3]]}}),
    ],
)
def test_arrays_must_fit(wide: ModelCard, shape: tuple[int, ...], fits: bool, change: dict[str, Any]) -> None:
    document = {**GOOD, "value": DIGEST, **change}
    if fits:
        check_array(document, wide.hooks[document["hook"]], shape, "value")
    else:
        with pytest.raises(InvalidJob, match=document["hook"]):
            check_array(document, wide.hooks[document["hook"]], shape, "value")


def test_every_op_can_be_written(wide: ModelCard) -> None:
    items = [
        zero(HOOK), scale(HOOK, 2), add(HOOK, 1), set_(HOOK, 1), interpolate(HOOK, 1, 0.5), steer(HOOK, VECTOR),
        project_out(HOOK, VECTOR), clamp(HOOK, VECTOR, max=1),
    ]  # fmt: skip
    assert {written(item, wide)[0][0]["op"] for item in items} == set(FORMS)
