"""From TransformerLens's token arrays to single prompts, and back to one padded tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lenspool.integrations.transformer_lens.errors import BadInput

_POSITIONS = ("pos", "q_pos", "k_pos")


@dataclass(frozen=True)
class Row:
    """One prompt of a batch.

    Attributes
    ----------
    tokens
        Without padding.
    start
        Where in the caller's row they begin.
    length
        Of the caller's row.
    """

    tokens: list[int]
    start: int
    length: int


def rows_of(input_ids: Any, attention_mask: Any = None) -> list[Row]:
    """The prompts of a batch.

    Parameters
    ----------
    input_ids
        `[pos]` or `[batch, pos]` as tensor, array or lists; lists may be ragged.
    attention_mask
        Of the same shape, 1 for tokens and 0 for the padding at both ends, which does not run.

    Raises
    ------
    BadInput
        Of other shapes, or the mask has a gap.
    """
    ids = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    prompts = [list(row) for row in ids] if ids and isinstance(ids[0], (list, tuple)) else [ids]
    if not all(prompts) or any(isinstance(token, (list, tuple, str)) for row in prompts for token in row):
        raise BadInput("input_ids", "not [pos] or [batch, pos] token ids, or an empty prompt")
    prompts = [[int(token) for token in row] for row in prompts]
    if attention_mask is None:
        return [Row(row, 0, len(row)) for row in prompts]
    mask = torch.as_tensor(attention_mask)
    mask = mask.unsqueeze(0) if mask.ndim == 1 else mask
    if mask.ndim != 2 or len(mask) != len(prompts):
        raise BadInput("attention_mask", f"has the shape {tuple(mask.shape)} for {len(prompts)} prompts")
    return [_trimmed(row, values.tolist()) for row, values in zip(prompts, mask, strict=True)]


def _trimmed(tokens: list[int], mask: list[Any]) -> Row:
    if len(mask) != len(tokens):
        reason = f"must have one value per input token; got {len(mask)} for {len(tokens)} tokens"
        raise BadInput("attention_mask", reason)
    if any(value not in (0, 1) for value in mask):
        raise BadInput("attention_mask", "values must be 0 or 1")
    kept = [i for i, value in enumerate(mask) if value]
    if not kept:
        raise BadInput("attention_mask", "must retain at least one prompt token")
    first, last = kept[0], kept[-1]
    if last - first + 1 != len(kept):
        raise BadInput("attention_mask", "cannot have gaps between prompt tokens")
    return Row(tokens[first : last + 1], first, len(tokens))


def joined(arrays: Sequence[torch.Tensor], rows: Sequence[Row], shape: Sequence[str], pad: float) -> torch.Tensor:
    """One tensor `[batch, ...]` of the rows' arrays.

    Each is put where the caller's row has its tokens; all else is `pad`.

    Parameters
    ----------
    shape
        Names of the arrays' dimensions (`HookInfo.shape`); those of positions are padded.
    """
    axes = [axis for axis, name in enumerate(shape) if name in _POSITIONS]
    ends = [[row.start + array.shape[axis] for axis in axes] for row, array in zip(rows, arrays, strict=True)]
    total = max(max([*end, row.length]) for end, row in zip(ends, rows, strict=True))
    size = [total if axis in axes else extent for axis, extent in enumerate(arrays[0].shape)]
    if len(rows) == 1 and list(arrays[0].shape) == size:
        return arrays[0].unsqueeze(0)
    out = arrays[0].new_full((len(rows), *size), pad)
    for i, (row, array) in enumerate(zip(rows, arrays, strict=True)):
        place = [
            slice(row.start, row.start + extent) if axis in axes else slice(None)
            for axis, extent in enumerate(array.shape)
        ]
        out[(i, *place)] = array
    return out
