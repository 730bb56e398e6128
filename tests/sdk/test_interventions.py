"""Equal meaning gives equal bytes; what cannot be done is refused with its field."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lenspool import ArrayRef, Intervention, InvalidJob, ModelCard, UnknownHook, UnsupportedHook, add, scale, set_, zero
from lenspool.edit_documents import to_documents
from lenspool_cache import canonical_json
from lenspool_cache.keys import array_digest

HOOK = "blocks.1.hook_resid_post"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
VECTOR = np.linspace(-1, 1, 16).astype(np.float32)


def written(*items: Intervention, card: ModelCard, generating: bool = False) -> bytes:
    return canonical_json(to_documents(items, card, TOKENS, generating=generating)[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (add(HOOK, VECTOR), add("resid_post.1", VECTOR.tolist())),
        (add(HOOK, VECTOR), add(HOOK, VECTOR.astype(np.float64), coefficient=1)),
        (add(HOOK, VECTOR), add(HOOK, ArrayRef(array_digest(VECTOR), (16,)))),
        (set_(HOOK, 0), set_(HOOK, -0.0)),
        (set_(HOOK, 2), set_(HOOK, np.float32(2.0))),
        (set_(HOOK, 2), set_(HOOK, np.array(2))),
        (set_(HOOK, np.zeros(16)), set_(HOOK, -np.zeros(16))),
        (zero(HOOK, positions=-1), zero(HOOK, positions=[9, 9])),
        (zero(HOOK, positions="all"), zero(HOOK, positions=slice(None))),
        (scale(HOOK, 2), scale(HOOK, 2.0, positions="prompt")),
    ],
)
def test_equal_meaning_equal_bytes(card: ModelCard, one: Intervention, other: Intervention) -> None:
    assert written(one, card=card) == written(other, card=card)


def test_different_meaning_different_bytes(card: ModelCard) -> None:
    items = [
        zero(HOOK),
        set_(HOOK, 0.0),
        scale(HOOK, 0.0),
        add(HOOK, 1.0),
        add(HOOK, 1.0, coefficient=2.0),
        add(HOOK, VECTOR),
        add(HOOK, VECTOR, positions=3),
        add(HOOK, VECTOR * 2),
        add("resid_pre.1", VECTOR),
    ]
    assert len({written(item, card=card) for item in items}) == len(items)
    assert written(items[0], items[3], card=card) != written(items[3], items[0], card=card)


def test_pattern_expands_to_one_edit_per_hook(card: ModelCard) -> None:
    documents, _ = to_documents(zero("blocks.*.hook_attn_out"), card, TOKENS, generating=False)
    assert [d["hook"] for d in documents] == [f"blocks.{i}.hook_attn_out" for i in range(4)]


def test_phase_becomes_positions(card: ModelCard) -> None:
    (document,), _ = to_documents(add(HOOK, 1.0, phase="generated"), card, TOKENS, generating=True)
    assert document["ranges"] == [[10, None]]


def test_bfloat16_array_is_taken_by_value(card: ModelCard) -> None:
    _, arrays = to_documents(add(HOOK, VECTOR.astype(ml_dtypes.bfloat16)), card, TOKENS, generating=False)
    (array,) = arrays.values()
    assert array.dtype == np.float32 and np.abs(array - VECTOR).max() < 0.01


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (add(HOOK, VECTOR[:3]), "interventions[0].value"),
        (add(HOOK, VECTOR[None]), "interventions[0].value"),
        (add(HOOK, np.full(16, np.nan)), "interventions[0].value"),
        (add(HOOK, [1e39] * 16), "interventions[0].value"),
        (add(HOOK, ["a"] * 16), "interventions[0].value"),
        (add(HOOK, float("inf")), "interventions[0].value"),
        (add(HOOK, True), "interventions[0].value"),
        (add(HOOK, None), "interventions[0].value"),
        (add(HOOK, "2"), "interventions[0].value"),
        (add(HOOK, 1.0, coefficient=float("nan")), "interventions[0].coefficient"),
        (scale(HOOK, None), "interventions[0].factor"),  # type: ignore[arg-type]
        (scale(HOOK, "2"), "interventions[0].factor"),  # type: ignore[arg-type]
        (zero(HOOK, positions=[]), "interventions[0].positions"),
        (zero(HOOK, positions=10), "interventions[0].positions"),
        (zero(HOOK, phase="generated"), "interventions[0].phase"),
        (Intervention("multiply", HOOK), "interventions[0].op"),
        (add(HOOK, ArrayRef("0" * 64, (3,))), "interventions[0].value"),
    ],
)
def test_bad_values_name_their_field(card: ModelCard, item: Intervention, field: str) -> None:
    with pytest.raises(InvalidJob) as error:
        to_documents([item], card, TOKENS, generating=False)
    assert error.value.field == field


def test_bad_hooks_and_types(card: ModelCard) -> None:
    with pytest.raises(UnknownHook):
        to_documents([zero("blocks.0.hook_nothing")], card, TOKENS, generating=False)
    with pytest.raises(UnsupportedHook, match="not edited"):
        to_documents([zero("logits")], card, TOKENS, generating=False)
    wrong: Any = [{"op": "zero"}]
    with pytest.raises(InvalidJob, match="dict"):
        to_documents(wrong, card, TOKENS, generating=False)
