"""Captures put together from arrays, of a model that has heads and patterns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lenspool import Capture, ModelCard
from lenspool.card import HookInfo

POST = "blocks.1.hook_resid_post"
Z = "blocks.0.attn.hook_z"
PATTERN = "blocks.0.attn.hook_pattern"
WORDS = ["<s>", " The", " <b>", " $x$", "\n", " end"]


def with_heads(card: ModelCard) -> ModelCard:
    extra = {
        Z: HookInfo(Z, 16, True, ("pos", "head", "d_head"), (2, 8)),
        PATTERN: HookInfo(PATTERN, 0, False, ("head", "q_pos", "k_pos"), (2, 0)),
    }
    return dataclasses.replace(card, hooks={**card.hooks, **extra})


def made(
    card: ModelCard,
    stored: Mapping[str, np.ndarray],
    *,
    positions: Sequence[int] | None = None,
    tokens: Sequence[str] | None = tuple(WORDS),
    count: int = 6,
) -> Capture:
    """A capture of rows as the store has them: `[rows, width]`."""
    return Capture(
        with_heads(card),
        hooks=list(stored),
        positions=np.array(range(count) if positions is None else positions),
        token_ids=list(range(10, 10 + count)),
        tokens=None if tokens is None else list(tokens)[:count],
        reader=lambda name: stored[name].copy(),
        cached=True,
        provenance={},
        strings=None if tokens is None else lambda ids: [f"word{i}" for i in ids],
    )


def rows(count: int, width: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(dtype)


def pattern(count: int) -> np.ndarray:
    """Causal patterns of two heads as the store has them, `[q_pos, head * k_pos]`."""
    weights = np.tril(np.random.default_rng(count).random((2, count, count)) + 0.1)
    weights /= weights.sum(-1, keepdims=True)
    return weights.swapaxes(0, 1).reshape(count, -1).astype(np.float32)
