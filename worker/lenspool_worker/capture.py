"""Rows of one job, collected over the steps of its run and put together by absolute position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import ml_dtypes
import numpy as np
import torch

from lenspool_cache.ranges import Range


class JobRows:
    """What the taps have copied for one job so far.

    Attributes
    ----------
    tag
        Id of this run of the job; a job that runs again has another.
    keep
        Whether rows are held. A process that does not store them still takes part in what is computed of them.
    error
        The first thing that went wrong while the job was planned, edited or copied; the job fails with it.
    bytes
        Bytes held.
    readers
        Hook -> what takes its rows at the end of each step instead of their being held: called with the position of the
        first row, and the rows. Not in a tap: a reader may run parts of the model.
    """

    def __init__(self, tag: str, *, keep: bool = True) -> None:
        self.tag = tag
        self.keep = keep
        self.error: str | None = None
        self.bytes = 0
        self.readers: dict[str, Callable[[int, torch.Tensor], None]] = {}
        self._unread: list[tuple[str, int, torch.Tensor]] = []
        self._chunks: dict[str, list[tuple[int, torch.Tensor]]] = {}

    def fail(self, reason: str) -> None:
        """Remember why the job cannot be answered; the first reason stays."""
        if self.error is None:
            self.error = reason

    def add(self, name: str, position: int, rows: torch.Tensor) -> None:
        """Take rows of a hook, `[n, width]`, that begin at a position."""
        if name in self.readers:
            self._unread.append((name, position, rows))
        else:
            self.hold(name, position, rows)

    def read(self) -> None:
        """Hand the step's rows to their readers."""
        unread, self._unread = self._unread, []
        for name, position, rows in unread:
            self.readers[name](position, rows)

    def hold(self, name: str, position: int, rows: torch.Tensor) -> None:
        """Keep rows of a hook or a readout until the job ends."""
        if not self.keep:
            return
        self._chunks.setdefault(name, []).append((position, rows))
        self.bytes += rows.numel() * rows.element_size()

    def fired(self) -> dict[str, int]:
        """Hook -> rows taken, replays counted each time."""
        return {name: sum(len(rows) for _, rows in chunks) for name, chunks in self._chunks.items()}

    def assemble(self, name: str, ranges: Iterable[Range]) -> list[tuple[int, np.ndarray]]:
        """Rows of a hook for each range, as `(start, [stop - start, width])`.

        Where a preempted request was computed twice, the later rows stand.

        Raises
        ------
        LookupError
            A position was never captured; names the hook and the positions.
        """
        return [(start, self._range(name, start, stop)) for start, stop in ranges]

    def _range(self, name: str, start: int, stop: int) -> np.ndarray:
        chunks = [c for c in self._chunks.get(name, ()) if c[0] < stop and c[0] + len(c[1]) > start]
        if len(chunks) == 1:
            position, rows = chunks[0]
            if position <= start and position + len(rows) >= stop:
                return to_numpy(rows[start - position : stop - position])
        missing = np.ones(stop - start, dtype=bool)
        out: np.ndarray | None = None
        for position, rows in chunks:
            low, high = max(position, start), min(position + len(rows), stop)
            array = to_numpy(rows[low - position : high - position])
            if out is None:
                out = np.empty((stop - start, array.shape[1]), dtype=array.dtype)
            out[low - start : high - start] = array
            missing[low - start : high - start] = False
        if out is None or missing.any():
            positions = (np.flatnonzero(missing) + start).tolist()
            raise LookupError(f"{name} has no rows at {len(positions)} positions: {positions[:8]}")
        return out


def to_numpy(rows: torch.Tensor) -> np.ndarray:
    """A tensor's values on the host, bit for bit; bfloat16 as ml_dtypes has it."""
    rows = rows.detach().cpu()
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return rows.numpy()


def gather(tensor: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Copy row spans of a tensor, one after another."""
    if len(spans) == 1:
        return tensor[spans[0][0] : spans[0][1]].clone()
    return torch.cat([tensor[a:b] for a, b in spans])
