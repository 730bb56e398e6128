"""Files of `lenspool capture --out`: dtypes that a kind has no name for, and no half-written file."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest

from lenspool import InvalidJob
from lenspool.cli.files import write

ARRAYS = {
    "blocks.0.hook_resid_post": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "logits|top_k(2)|indices": np.array([[1, 2], [3, 4]], np.int32),
    "blocks.0.attn.hook_pattern": np.asfortranarray(np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 2, 2)),
}


def read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name] for name in file if name != "about"}, str(file["about"])
    if path.suffix == ".h5":
        with h5py.File(path) as file:
            return {name: file[name][()] for name in file}, file.attrs["about"]
    safetensors = pytest.importorskip("safetensors", reason="an extra")
    with safetensors.safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["about"]  # noqa: SIM118


@pytest.mark.parametrize("ending", [".npz", ".h5", ".safetensors"])
def test_what_is_written_is_read(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows{ending}"
    path.write_text("an older file")
    write(path, ARRAYS, {"prompt": "naïve"})
    found, about = read(path)
    assert json.loads(about) == {"prompt": "naïve"} and found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        kept = array.dtype if ending == ".safetensors" or array.dtype.name != "bfloat16" else np.float32
        assert found[name].dtype == kept and np.array_equal(found[name], array)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.h5"
    path.write_text("an older file")
    with pytest.raises(TypeError):
        write(path, {"x": np.array([object()])}, {})
    assert path.read_text() == "an older file" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(InvalidJob, match=r"\.npz, \.safetensors, \.h5"):
        write(tmp_path / "rows.csv", ARRAYS, {})
