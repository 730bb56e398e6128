"""Rows that look like a model's: of the right shape and kind, the same each time, and meaningless."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from lenspool import entries
from lenspool.card import HookInfo, ModelCard
from lenspool.hooks import template
from lenspool_cache.codec import dtype_of

_SIGNED = {"loss": 1, "entropy": 1, "norm": 1, "logprobs": -1}
"""Readouts whose numbers have one sign."""


def fake_rows(card: ModelCard, run: str, name: str, positions: list[int], length: int) -> np.ndarray:
    """Rows `[positions, width]` of a hook or of a readout's entry; each row follows from run, name and position.

    Attention patterns are causal and sum to 1, counts and places lie in their range, the largest stand first.
    """
    if not entries.is_readout(name):
        info, entry = card.hooks[name], None
    else:
        entry = entries.parse(name)
        info = entries.info(entry, card)
    whole = name if entry is None else entry.whole.name  # the parts of a readout belong together
    made = [_row(card, info, entry, _random(run, whole, p), p, length) for p in positions]
    return np.stack(made).astype(dtype_of(info.dtype or card.dtype))


def _random(run: str, name: str, position: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{run}\0{name}\0{position}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _row(
    card: ModelCard, info: HookInfo, entry: entries.Entry | None, random: np.random.Generator, at: int, length: int
) -> np.ndarray:
    if 0 in info.dims:
        return _attention(card, info, random, at, length)
    width = math.prod(info.dims) if info.dims else info.width
    numbers = random.standard_normal(width)
    if entry is None:
        return np.abs(numbers) + 0.1 if template(info.name).endswith("hook_scale") else numbers
    if entry.op in ("top_k", "sae"):
        k = width if entry.part != "active" else 1
        most = entry.args[2] if entry.op == "sae" else entries.width_read(entry, card)
        if entry.part == "active":
            return np.full(1, min(entry.args[1], most))
        places = random.permutation(most)[:k]
        return places if entry.part == "indices" else -np.sort(-np.abs(numbers))
    if entry.op == "rank":
        return random.integers(0, card.vocab_size, width)
    return numbers if entry.op not in _SIGNED else _SIGNED[entry.op] * np.abs(numbers)


def _attention(card: ModelCard, info: HookInfo, random: np.random.Generator, at: int, length: int) -> np.ndarray:
    scores = random.standard_normal((info.dims[0], length))
    seen = np.arange(length) <= at
    if info.name.endswith("hook_pattern"):
        weights = np.exp(scores) * seen
        return (weights / weights.sum(-1, keepdims=True)).ravel()
    lowest = -3.4028234663852886e38 if card.dtype != "float16" else -65504.0
    return np.where(seen, scores, lowest).ravel()
