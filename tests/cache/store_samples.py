"""Runs and rows that the tests of the store put, and ways to look at and hurt its files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from lenspool_cache import Run


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal dtype, shape and bytes: NaN equals itself, -0 is not 0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def a_run(number: int = 0) -> Run:
    return Run({"v": 1, "context": {"model": "m"}, "tokens": [1, 2, number], "interventions": [], "sampling": None})


def rows_of(number: int, rows: int = 16, width: int = 64, dtype: str = "float32") -> np.ndarray:
    """Rows that only this number gives."""
    values = np.random.default_rng(number).standard_normal((rows, width)) * 100
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def pack_files(folder: Path) -> list[Path]:
    return sorted((folder / "packs").glob("*.h5"))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
