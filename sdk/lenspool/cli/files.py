"""Files that `lenspool capture --out` writes: .npz, .safetensors and .h5, by the name's ending."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from lenspool.errors import InvalidJob
from lenspool.extras import needed

Arrays = Mapping[str, np.ndarray]


def write(path: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Write arrays by hook name, and what was run as JSON; the file is there whole or not at all.

    Parameters
    ----------
    about
        What JSON can hold: prompt, token ids, positions, model. In `.npz` the array `about`, in `.safetensors` the
        metadata, in `.h5` the attribute `about`.

    Raises
    ------
    InvalidJob
        The name has another ending.
    """
    check_name(path)
    whole = path.with_name(f".{path.name}.part")
    try:
        _WRITERS[path.suffix](whole, arrays, json.dumps(about))
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)


def check_name(path: Path) -> None:
    """Refuse a file of another kind before anything is run for it.

    Raises
    ------
    InvalidJob
        The name has another ending.
    """
    if path.suffix not in _WRITERS:
        raise InvalidJob("out", f"got {path.name}", "a name ending in " + ", ".join(_WRITERS))


def _npz(path: Path, arrays: Arrays, about: str) -> None:
    columns: dict[str, Any] = {name: _readable(array) for name, array in arrays.items()}
    with path.open("wb") as file:
        np.savez(file, **columns, about=np.array(about))


def _hdf5(path: Path, arrays: Arrays, about: str) -> None:
    with h5py.File(path, "w") as file:
        file.attrs["about"] = about
        for name, array in arrays.items():
            file.create_dataset(name, data=_readable(array))


def _safetensors(path: Path, arrays: Arrays, about: str) -> None:
    needed("safetensors.numpy").save_file(
        {name: np.ascontiguousarray(a) for name, a in arrays.items()}, path, {"about": about}
    )


def _readable(array: np.ndarray) -> np.ndarray:
    """Bfloat16 as float32: npz and HDF5 have no name for it."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


_WRITERS: dict[str, Callable[[Path, Arrays, str], None]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".h5": _hdf5,
}
