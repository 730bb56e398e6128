"""The commands that need no pool; `build` is in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lenspool import Dataset
from lenspool.cli import app
from lenspool.testing import FakePool
from tests.datasets.conftest import HOOKS, numbered

HOOK = "blocks.1.hook_resid_post"


def run(*arguments: str, fails: bool = False) -> Any:
    result = CliRunner().invoke(app, ["dataset", *arguments, "--json"])
    assert (result.exit_code != 0) == fails, result.output
    return result.stderr if fails else json.loads(result.stdout)


def test_status_statistics_and_failures(dataset: Dataset) -> None:
    store = str(dataset.folder.parent.parent)
    status = run("status", "rows", "--store", store)
    assert status["finished"] and status["rows"] == status["of"] == 60 and status["hash"] == dataset.hash
    assert run("status", str(dataset.folder)) == status
    found = run("stats", "rows", "--hook", "resid_post.1", "--skip", "1", "--store", store)
    assert found["hook"] == HOOK and found["count"] == dataset.n_tokens - 60
    assert np.allclose(found["mean"], dataset.statistics(HOOK, skip=1).mean)
    assert run("failures", str(dataset.folder)) == []
    assert "no dataset" in run("stats", "other", "--hook", HOOK, "--store", store, fails=True)
    assert "--store" in run("status", "rows", fails=True)


async def test_a_job_that_was_left_tells_how_far_it_is(tmp_path: Path) -> None:
    rows = numbered(40)
    rows[3]["text"] = ""
    pool = FakePool(store=tmp_path / "store")

    def some() -> Any:
        yield from rows[:25]
        raise RuntimeError("the source ends here")

    with pytest.raises(RuntimeError, match="ends here"):
        await pool.client().dataset("left", some(), HOOKS, chunk=5)
    status = run("status", "left", "--store", str(tmp_path / "store"))
    assert not status["finished"] and status["hash"] is None and status["rows"] % 5 == 0
    await pool.client().dataset("left", rows, HOOKS, chunk=5)
    status = run("status", "left", "--store", str(tmp_path / "store"))
    assert status["finished"] and status["failures"] == 1 and status["rows"] == 40
    (failure,) = run("failures", "left", "--store", str(tmp_path / "store"))
    assert failure["row"] == 3
    released = run("release", "left", "--store", str(tmp_path / "store"))
    assert released["name"] == "left" and released["pins"] >= 8  # of each chunk, by each driver that had it
    assert pool.store is not None and not pool.store.pins.all()


@pytest.mark.parametrize(
    ("format", "options", "left"),
    [
        ("sae-lens", ["--hook", HOOK, "--context", "8"], "dataset_info.json"),
        ("safetensors", ["--hook", HOOK, "--hook", "z.1", "--dtype", "float16"], "rows-00000.safetensors"),
        ("zarr", ["--hook", HOOK], "zarr.json"),
        ("parquet", ["--hook", HOOK, "--pool", "last"], ""),
        ("numpy", ["--hook", HOOK], f"{HOOK}.float32"),
    ],
)
def test_exports(dataset: Dataset, tmp_path: Path, format: str, options: list[str], left: str) -> None:
    for module in ("datasets", "safetensors", "zarr", "pyarrow"):
        pytest.importorskip(module, reason="an extra")
    out = tmp_path / "out"
    told = run("export", str(dataset.folder), str(out), "--format", format, *options)
    assert told["format"] == format and out.exists()
    assert not left or any(path.name.startswith(left) for path in out.iterdir())
    if format in ("sae-lens", "numpy"):
        assert "takes one" in run("export", str(dataset.folder), str(tmp_path / "x"), "--format", format, fails=True)
