"""How far two runs are the same: rows of a position follow from the tokens, and the edits, up to it.

So a run may take rows from any other whose document agrees with its own up to there. Documents decide that, token by
token (`common`). Chained hashes of blocks of positions (`Run.blocks`) only find candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

BLOCK = 16
"""Positions in a block; prompts that share less are not noticed."""

_WIDE = ("attn.hook_pattern", "attn.hook_attn_scores")
_REDUCTIONS = ("mean(", "max(")
_AHEAD = "loss("

_TOLD = ("v", "context", "tokens", "interventions")
_LATER = ("sampling", "nonce")
"""Fields of a run's document that decide nothing of its prompt. One that is not known here decides all of it."""

Edits = Sequence[Mapping[str, Any]]


def edits_within(edits: Iterable[Mapping[str, Any]], start: int, stop: int) -> list[dict[str, Any]]:
    """What edits do to positions `[start, stop)`: their documents with the ranges there.

    Where each position takes a row of its own of a value, a range says which is its first.
    """
    here = []
    for document in edits:
        own_rows = isinstance(document.get("value"), dict) and "rows" in document["value"]
        before, parts = 0, []
        for low, high in document["ranges"]:
            a, b = max(low, start), stop if high is None else min(high, stop)
            if a < b:
                parts.append([a, b, *([before + a - low] if own_rows else [])])
            before += 0 if high is None else high - low
        if parts:
            here.append({**document, "ranges": parts})
    return here


def is_wide(name: str) -> bool:
    """Whether the rows of an entry are as wide as its run is long: no two runs have rows of the same width."""
    return name.partition("|")[0].endswith(_WIDE)


def reach(name: str) -> int | None:
    """How many positions behind its own a row of an entry follows from; None where that is not known.

    Known of hooks, but for attention patterns, whose rows are as wide as the run is long; and of what is read from each
    row of a hook by itself.
    """
    hook, _, readout = name.partition("|")
    if "hook_" not in hook or is_wide(name) or readout.startswith(_REDUCTIONS):
        return None
    return 1 if readout.startswith(_AHEAD) else 0


def sequence(document: Mapping[str, Any]) -> tuple[Any, list[int], Edits] | None:
    """What a run's document says of its prefixes: of all positions, of each, and the edits.

    None when it says nothing, or that the run stands alone.
    """
    tokens, edits = document.get("tokens"), document.get("interventions", [])
    if not isinstance(tokens, list) or not isinstance(edits, list) or "reuse" in document:
        return None
    rest = {name: value for name, value in document.items() if name not in _TOLD and name not in _LATER}
    return [document.get("v"), document.get("context"), *([rest] if rest else [])], tokens, edits


def common(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Number of leading positions at which all that decides the rows of two runs is the same."""
    one, two = sequence(a), sequence(b)
    if one is None or two is None or one[0] != two[0]:
        return 0
    (_, tokens, edits), (_, other_tokens, other_edits) = one, two
    length = min(len(tokens), len(other_tokens))
    same = _last(length, lambda stop: tokens[:stop] == other_tokens[:stop])
    if edits == other_edits:
        return same
    return _last(same, lambda stop: edits_within(edits, 0, stop) == edits_within(other_edits, 0, stop))


def _last(most: int, holds: Callable[[int], bool]) -> int:
    """The last position up to which something holds, which holds up to all before it."""
    low, high = 0, most
    while low < high:
        middle = high if high == most else (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
