"""Arrays come in the hook's shape, and go in either shape; a card keeps what differs from layer to layer."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from lenspool import InvalidJob, ModelCard, UnsupportedHook, add
from lenspool.card import HookInfo
from lenspool.edit_documents import to_documents
from lenspool.hooks import resolve

Q = "blocks.0.attn.hook_q"
PATTERN = "blocks.0.attn.hook_pattern"


@pytest.fixture
def wide(card: ModelCard) -> ModelCard:
    extra = {
        Q: HookInfo(Q, 16, True, ("pos", "head", "d_head"), (2, 8)),
        PATTERN: HookInfo(PATTERN, 0, False, ("head", "q_pos", "k_pos"), (2, 0)),
        "blocks.1.mlp.hook_pre": HookInfo("blocks.1.mlp.hook_pre", 32, True, ("pos", "d_mlp"), (32,)),
        "blocks.2.mlp.hook_pre": HookInfo("blocks.2.mlp.hook_pre", 64, True, ("pos", "d_mlp"), (64,)),
        "blocks.0.attn.hook_out": HookInfo("blocks.0.attn.hook_out", 16, True),
    }
    refusals = {"blocks.{layer}.mlp.hook_pre": "experts"}
    return dataclasses.replace(card, hooks={**card.hooks, **extra}, refusals=refusals)


def test_rows_take_the_shape_of_the_hook(wide: ModelCard) -> None:
    rows = np.arange(3 * 16).reshape(3, 16)
    assert np.array_equal(wide.hooks[Q].arrange(rows)[2, 1], rows[2, 8:])
    pattern = wide.hooks[PATTERN].arrange(np.arange(3 * 2 * 5).reshape(3, 10))
    assert pattern.shape == (2, 3, 5)
    assert np.array_equal(pattern[1, 2], [25, 26, 27, 28, 29])


def test_a_card_survives_its_json_form(wide: ModelCard) -> None:
    again = ModelCard.from_dict(json.loads(json.dumps(wide.to_dict())))
    assert again.hooks == wide.hooks
    assert again.hooks["blocks.2.mlp.hook_pre"].width == 64


def test_both_shapes_of_an_array_are_one_edit(wide: ModelCard) -> None:
    value = np.arange(16, dtype=np.float32)
    flat = to_documents(add(Q, value), wide, [1, 2, 3, 4], generating=False)
    shaped = to_documents(add(Q, value.reshape(2, 8)), wide, [1, 2, 3, 4], generating=False)
    assert flat[0] == shaped[0]
    assert next(iter(shaped[1].values())).shape == (16,)
    with pytest.raises(InvalidJob, match="has shape"):
        to_documents(add(Q, value.reshape(8, 2)), wide, [1, 2, 3, 4], generating=False)


def test_the_raw_output_has_its_name_where_a_norm_follows(wide: ModelCard) -> None:
    assert resolve("blocks.0.attn.hook_out", wide) == ["blocks.0.attn.hook_out"]
    assert resolve("blocks.1.attn.hook_out", wide) == ["blocks.1.hook_attn_out"]


def test_a_layer_without_the_hook_is_refused_with_the_reason(wide: ModelCard) -> None:
    with pytest.raises(UnsupportedHook, match="experts"):
        resolve("blocks.0.mlp.hook_pre", wide)
    with pytest.raises(UnsupportedHook, match="4 layers"):
        resolve("blocks.9.mlp.hook_pre", wide)
