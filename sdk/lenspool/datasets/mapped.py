"""All rows of a hook as one numpy file that is mapped, not read."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import open_memmap

from lenspool.errors import InvalidJob
from lenspool.progress import tracked

if TYPE_CHECKING:
    from lenspool.datasets.manifest import Dataset


@dataclass(frozen=True)
class Mapped:
    """Rows of all sequences, one behind the other.

    Attributes
    ----------
    array
        `[tokens, width]`, mapped read-only.
    starts
        int64 `[sequences + 1]`: rows of sequence i are `array[starts[i]:starts[i + 1]]`.
    """

    array: np.ndarray
    starts: np.ndarray

    def __getitem__(self, number: int) -> np.ndarray:
        """Rows of a sequence."""
        return self.array[self.starts[number] : self.starts[number + 1]]

    def __len__(self) -> int:
        return len(self.starts) - 1


def plain_dtype(dtype: np.dtype, wanted: Any | None = None) -> np.dtype:
    """The type of numpy's own in which numbers are handed on: as they are, bfloat16 as float32.

    Raises
    ------
    InvalidJob
        The one that is wanted is not of floats.
    """
    chosen = np.dtype(wanted) if wanted is not None else np.dtype("float32") if dtype.name == "bfloat16" else dtype
    if wanted is not None and chosen.name not in ("float16", "float32", "float64"):
        raise InvalidJob("dtype", f"got {wanted!r}", "float16, float32 or float64")
    return chosen


def starts_of(dataset: Dataset, name: str) -> np.ndarray:
    """int64 `[sequences + 1]`: at which row of all each sequence begins."""
    lengths = [len(dataset.positions(number, name)) for number in range(len(dataset))]
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def map_tokens(dataset: Dataset, name: str, folder: Path, dtype: Any | None, progress: bool) -> Mapped:
    """See `Dataset.memmap`."""
    chosen = plain_dtype(dataset.dtype(name), dtype)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('/', '_')}.{chosen.name}.{dataset.hash[:12]}"
    if len(stem) > 200:
        raise InvalidJob("hook", f"{name} is too long for the name of a file", "a hook, or a shorter readout")
    path, starts_path = folder / f"{stem}.npy", folder / f"{stem}.starts.npy"
    if not path.exists():
        starts = starts_of(dataset, name)
        draft = folder / f".{uuid.uuid4().hex}.npy"
        array = open_memmap(draft, "w+", chosen, (int(starts[-1]), dataset.width(name)))
        for number in tracked(range(len(dataset)), progress, "memmap"):
            array[starts[number] : starts[number + 1]] = dataset.matrix(number, name)
        array.flush()
        del array
        np.save(starts_path, starts)
        draft.replace(path)  # last: who finds it finds the other, too
    return Mapped(np.load(path, mmap_mode="r"), np.load(starts_path))
