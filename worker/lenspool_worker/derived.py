"""Hooks that are computed when a job ends, from rows that were captured for it: attention scores and patterns.

An attention kernel never has the pattern as a tensor; it is computed here from the queries and keys that the kernel
took in the same run, with its own scale, mask and sinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lenspool_cache.ranges import OpenRange, Range
from lenspool_worker.capture import JobRows, to_numpy

_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Pattern:
    """Attention scores or probabilities of a layer; a row belongs to a query position, `[head * k_pos]`.

    Attributes
    ----------
    rows_of, prefix_of
        Hooks with the queries, and with the keys, which are needed at all positions up to a query's.
    scale, soft_cap, window, sinks
        The kernel's. `window` is the number of keys that a query sees, itself included; None for all. `sinks` has a
        score per head that takes part in the softmax.
    scores
        Give the scores, not their softmax.
    """

    rows_of: str
    prefix_of: str
    heads: int
    kv_heads: int
    scale: float
    soft_cap: float | None
    window: int | None
    sinks: torch.Tensor | None
    scores: bool

    def compute(self, rows: torch.Tensor, prefix: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """Queries `[n, head * d_head]` at the positions from `start` on, and keys `[start + n, kv_head * d_head]`, give
        `[n, head * length]` in a run of `length` positions.
        """
        out = torch.empty((len(rows), self.heads, length), dtype=rows.dtype)
        step = max(1, _CHUNK_BYTES // (4 * self.heads * length))
        keys = prefix.float().view(len(prefix), self.kv_heads, -1).transpose(0, 1)  # [kv_head, k_pos, d_head]
        keys = keys.repeat_interleave(self.heads // self.kv_heads, 0)
        for at in range(0, len(rows), step):
            stop = min(at + step, len(rows))
            queries = rows[at:stop].float().view(stop - at, self.heads, -1).transpose(0, 1)
            scores = queries @ keys.transpose(1, 2) * self.scale  # [head, q_pos, k_pos]
            out[at:stop] = self._finish(scores, start + at, length, rows.dtype).transpose(0, 1)
        return out.flatten(1)

    def _finish(self, scores: torch.Tensor, first: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Soft-cap, mask and softmax of `[head, q_pos, k_pos]`, padded to all keys of the run."""
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        query = torch.arange(first, first + scores.shape[1])[:, None]
        key = torch.arange(scores.shape[2])[None, :]
        hidden = key > query
        if self.window is not None:
            hidden |= query - key >= self.window
        lowest = torch.finfo(dtype).min
        rest = length - scores.shape[2]
        if self.scores:
            return torch.nn.functional.pad(scores.masked_fill(hidden, lowest), (0, rest), value=lowest)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is None:
            return torch.nn.functional.pad(scores.softmax(-1), (0, rest))
        sinks = self.sinks.float().cpu().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return torch.nn.functional.pad(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1], (0, rest))


class DerivedHooks(dict[str, Pattern]):
    """The derived hooks of a model, by name."""

    def sources(self, captures: Iterable[tuple[Iterable[str], list[OpenRange]]]) -> list[tuple[str, list[OpenRange]]]:
        """What has to be captured for what is asked for: each hook with its ranges, merged.

        Derived hooks are replaced by those that they are computed from.
        """
        wanted: dict[str, list[OpenRange]] = {}
        for names, ranges in captures:
            for name in names:
                derived = self.get(name)
                if derived is None:
                    wanted.setdefault(name, []).extend(ranges)
                    continue
                wanted.setdefault(derived.rows_of, []).extend(ranges)
                ends = [stop for _, stop in ranges]
                whole = (0, None if None in ends else max(stop for stop in ends if stop is not None))
                wanted.setdefault(derived.prefix_of, []).append(whole)
        return [(name, merged(ranges)) for name, ranges in wanted.items()]

    def assemble(self, rows: JobRows, name: str, ranges: Iterable[Range], length: int) -> list[tuple[int, np.ndarray]]:
        """Rows of any hook for each range, as `JobRows.assemble` gives them; derived ones are computed.

        Raises
        ------
        LookupError
            A position was never captured.
        """
        derived = self.get(name)
        if derived is None:
            return rows.assemble(name, ranges)
        out = []
        for start, stop in ranges:
            own = _tensor(rows, derived.rows_of, start, stop)
            prefix = _tensor(rows, derived.prefix_of, 0, stop)
            out.append((start, to_numpy(derived.compute(own, prefix, start, length))))
        return out


def _tensor(rows: JobRows, name: str, start: int, stop: int) -> torch.Tensor:
    return to_torch(rows.assemble(name, [(start, stop)])[0][1])


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The inverse of `to_numpy`, on the host."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array)


def merged(ranges: Iterable[OpenRange]) -> list[OpenRange]:
    """Ranges without overlaps, so that no row is taken twice."""
    out: list[OpenRange] = []
    for start, stop in sorted(ranges, key=lambda r: r[0]):
        if not out:
            out.append((start, stop))
            continue
        low, high = out[-1]
        if high is not None and start > high:
            out.append((start, stop))
        elif high is not None:
            out[-1] = (low, None if stop is None else max(high, stop))
    return out


def group(
    wanted: Iterable[tuple[str, list[OpenRange]]], sites: Mapping[str, int]
) -> list[tuple[list[int], list[OpenRange]]]:
    """Sites that want the same ranges, together."""
    groups: dict[tuple[OpenRange, ...], list[int]] = {}
    for name, ranges in wanted:
        groups.setdefault(tuple(ranges), []).append(sites[name])
    return [(numbers, list(ranges)) for ranges, numbers in groups.items()]
