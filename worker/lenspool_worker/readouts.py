"""Readouts of a job in vLLM's worker process: of logits at the end of each step, of other rows when the job ends.

So that only what was read reaches the store, and a job that reads logits holds a chunk of them at most. What the lens
makes of a stream is computed in the steps too, as the model's CPU kernels keep state: only its own thread may run them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lenspool import entries
from lenspool.entries import LOGITS, Entry
from lenspool_cache import ranges as rg
from lenspool_cache.ranges import OpenRange, Range
from lenspool_worker.arrays import DeviceArrays
from lenspool_worker.capture import JobRows, to_numpy
from lenspool_worker.derived import DerivedHooks, merged, to_torch
from lenspool_worker.parallel import Place
from lenspool_worker.readout_math import read

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 2**20
LOGIT_ROWS = 128
"""Rows of logits that are built at once."""

Captures = Sequence[tuple[Sequence[str], list[OpenRange]]]
Rows = list[tuple[int, np.ndarray]]


Reader = Callable[[int, torch.Tensor], None]


class LogitReader:
    """What a job makes of logits, chunk by chunk.

    Parameters
    ----------
    rows
        Where it goes.
    plain
        Positions at which the logits themselves are wanted.
    readings
        Readouts and their positions.
    tokens
        The prompt, for `loss`.
    """

    def __init__(
        self,
        rows: JobRows,
        plain: list[OpenRange],
        readings: Sequence[tuple[Entry, list[OpenRange]]],
        tokens: Sequence[int],
        matrices: DeviceArrays,
    ) -> None:
        self._rows = rows
        self._plain = plain
        self._readings = readings
        self._tokens = tokens
        self._matrices = matrices

    def __call__(self, position: int, logits: torch.Tensor) -> None:
        """Take logits `[n, vocabulary]` that begin at a position.

        What goes wrong is charged to the job here: the processes of a model must go on to its next logits together.
        """
        if not self._rows.keep:
            return
        try:
            self._take(position, logits)
        except Exception as error:
            log.exception("a readout failed")
            self._rows.fail(f"readout: {error}")

    def _take(self, position: int, logits: torch.Tensor) -> None:
        for start, part in _parts(self._plain, position, logits):
            # a part of a chunk would keep all of it
            self._rows.hold(LOGITS, start, part if len(part) == len(logits) else part.clone())
        for entry, ranges in self._readings:
            for start, part in _parts(ranges, position, logits):
                following = None
                if entry.op == "loss":
                    following = torch.tensor(self._tokens[start + 1 : start + 1 + len(part)])
                for stored, value in read(entry, part, self._matrices, following).items():
                    self._rows.hold(_stored(entry, stored), start, value.reshape(len(part), -1))


class LensReader:
    """What a job makes of a residual stream through the final norm and the unembedding.

    Parameters
    ----------
    keep
        Hook under which the stream's rows are held as well; None where nothing else is made of them.
    """

    def __init__(
        self, model: Any, final_norm: Any, logits: LogitReader, rows: JobRows, keep: str | None, place: Place
    ) -> None:
        self._place = place
        self._model = model
        self._final_norm = final_norm
        self._logits = logits
        self._rows = rows
        self._keep = keep

    def __call__(self, position: int, stream: torch.Tensor) -> None:
        """Take rows of the stream `[n, d_model]` that begin at a position."""
        if self._keep is not None:
            self._rows.hold(self._keep, position, stream)
        for at in range(0, len(stream), LOGIT_ROWS):
            logits = self._place.together(self._compute, stream[at : at + LOGIT_ROWS])
            if logits is not None:  # as in all but one process of a group
                self._logits(position + at, logits)

    def _compute(self, stream: torch.Tensor) -> torch.Tensor | None:
        # not called as a module, which would run its taps; on a copy, as a norm's kernel may write into its input
        normed = self._final_norm.forward(stream.clone())
        return self._model.compute_logits(normed[0] if isinstance(normed, tuple) else normed)


class Readouts:
    """The readouts of one process.

    Parameters
    ----------
    derived
        Hooks that are computed from others.
    widths
        Of each hook that is served.
    model, final_norm
        vLLM's model, for its unembedding, and the norm in front of that.
    place
        Of this process among those of the model.
    """

    def __init__(
        self,
        derived: DerivedHooks,
        widths: Mapping[str, int],
        model: Any,
        final_norm: Any,
        device: torch.device,
        place: Place = Place(),  # noqa: B008
    ) -> None:
        self._place = place
        self._derived = derived
        self._widths = widths
        self._model = model
        self._final_norm = final_norm
        self._device = device
        self.arrays = DeviceArrays(device)

    def sources(self, captures: Captures) -> list[tuple[str, list[OpenRange]]]:
        """What has to be captured for what is asked for: each hook that has a tap, with its ranges."""
        asked: list[tuple[list[str], list[OpenRange]]] = []
        for names, ranges in captures:
            for name in names:
                if entries.is_readout(name):
                    entry = entries.parse(name)
                    asked.append(([entry.hook], entry.reads(ranges)))
                else:
                    asked.append(([name], ranges))
        return self._derived.sources(asked)

    def readers(self, rows: JobRows, captures: Captures, tokens: Sequence[int]) -> dict[str, Reader]:
        """Hook -> what a job makes of its rows in each step, where that is more than holding them."""
        readings: dict[str, dict[Entry, list[OpenRange]]] = {LOGITS: {}}
        held: dict[str, list[OpenRange]] = {}
        for names, ranges in captures:
            for name in names:
                if not entries.is_readout(name):
                    held.setdefault(name, []).extend(ranges)
                    continue
                entry = entries.parse(name).whole
                if entry.in_step:
                    readings.setdefault(entry.hook, {}).setdefault(entry, []).extend(ranges)
                else:
                    held.setdefault(entry.hook, []).extend(entry.reads(ranges))
        out: dict[str, Reader] = {}
        for hook, items in readings.items():
            of_hook = [(entry, merged(ranges)) for entry, ranges in items.items()]
            plain = merged(held.get(hook, [])) if hook == LOGITS else []
            logits = LogitReader(rows, plain, of_hook, tokens, self.arrays)
            if hook == LOGITS:
                out[hook] = logits
            else:
                keep = hook if hook in held else None
                out[hook] = LensReader(self._model, self._final_norm, logits, rows, keep, self._place)
        return out

    def assemble(self, rows: JobRows, wanted: Mapping[str, Sequence[Range]], length: int) -> dict[str, Rows]:
        """Rows of hooks and of readouts' entries for each of their ranges, at the end of a job.

        Raises
        ------
        LookupError
            A position was never captured.
        """
        out: dict[str, Rows] = {}
        for name, ranges in wanted.items():
            if name in out:
                continue
            if not entries.is_readout(name):
                out[name] = self._derived.assemble(rows, name, ranges, length)
                continue
            entry = entries.parse(name).whole
            if entry.in_step:
                out[name] = rows.assemble(name, ranges)
            elif entry.reduces:
                out[name] = [(0, self._reduce(rows, entry, length))]
            else:
                parts = self._read(rows, entry, ranges, length)
                # all arrays of a readout at once, where they are wanted at the same positions
                out |= {n: part for n, part in parts.items() if n == name or wanted.get(n) == ranges}
        return out

    def _read(self, rows: JobRows, entry: Entry, ranges: Sequence[Range], length: int) -> dict[str, Rows]:
        out: dict[str, Rows] = {stored.name: [] for stored in entry.stored}
        for start, array in self._derived.assemble(rows, entry.hook, ranges, length):
            chunks: dict[str, list[np.ndarray]] = {name: [] for name in out}
            widest = max(array.shape[1], entry.args[2] if entry.op == "sae" else 0)
            for chunk in to_torch(array).split(max(1, _CHUNK_BYTES // (4 * widest))):
                with torch.inference_mode():
                    found = read(entry, chunk.to(self._device), self.arrays, None)
                for part, value in found.items():
                    chunks[_stored(entry, part)].append(to_numpy(value.reshape(len(chunk), -1)))
            for name, arrays in chunks.items():
                out[name].append((start, np.concatenate(arrays)))
        return out

    def _reduce(self, rows: JobRows, entry: Entry, length: int) -> np.ndarray:
        """One row `[1, width]` over the entry's own ranges; NaN without positions."""
        ranges = rg.close(entry.args[0], length)
        if not ranges:
            return np.full((1, self._widths[entry.hook]), np.nan, np.float32)
        arrays = [array.astype(np.float32) for _, array in self._derived.assemble(rows, entry.hook, ranges, length)]
        if entry.op == "max":
            return np.max([array.max(0) for array in arrays], axis=0)[None]
        total = np.sum([array.sum(0, dtype=np.float64) for array in arrays], axis=0)
        return (total / rg.count(ranges)).astype(np.float32)[None]


def _stored(entry: Entry, part: str) -> str:
    return f"{entry.name}.{part}" if part else entry.name


def _parts(ranges: Iterable[OpenRange], position: int, rows: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    """The pieces of rows that lie in ranges, with their positions."""
    end = position + len(rows)
    for start, stop in ranges:
        low, high = max(start, position), end if stop is None else min(stop, end)
        if low < high:
            yield low, rows[low - position : high - position]
