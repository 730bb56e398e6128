"""The check at boot finds each fault that is planted in a small model's rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lenspool_worker.capture import JobRows
from lenspool_worker.selfcheck import problems

LAYERS, LENGTH, WIDTH = 3, 8, 16
HOOKS = ["hook_embed"]
for i in range(LAYERS):
    HOOKS += [f"blocks.{i}.hook_{n}" for n in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")]
HOOKS += ["ln_final.hook_out"]
Arrays = dict[str, np.ndarray]


def right_arrays() -> Arrays:
    """A stream with massive activations at position 0, as real models have them."""
    random = np.random.default_rng(0)

    def part() -> np.ndarray:
        return random.standard_normal((LENGTH, WIDTH)).astype(np.float32)

    stream = part()
    stream[0, 3] = 2.5e4
    arrays = {"hook_embed": stream.copy(), "ln_final.hook_out": part()}
    for i in range(LAYERS):
        block = f"blocks.{i}.hook"
        arrays[f"{block}_resid_pre"] = stream
        arrays[f"{block}_attn_out"] = part()
        arrays[f"{block}_resid_mid"] = stream + arrays[f"{block}_attn_out"]
        arrays[f"{block}_mlp_out"] = part()
        stream = arrays[f"{block}_resid_mid"] + arrays[f"{block}_mlp_out"]
        arrays[f"{block}_resid_post"] = stream
    return arrays


def found(arrays: Arrays, tolerance: float = 1e-4, dtype: torch.dtype = torch.float32) -> list[str]:
    rows = JobRows("check")
    for name, array in arrays.items():
        rows.add(name, 0, torch.from_numpy(array).to(dtype))
    return problems(rows, HOOKS, LENGTH, tolerance)


def test_right_rows_pass() -> None:
    assert found(right_arrays()) == []


def test_right_rows_pass_in_bfloat16() -> None:
    """With the tolerance that such a model is served with."""
    assert found(right_arrays(), 5e-2, torch.bfloat16) == []


def drop(arrays: Arrays) -> None:
    del arrays["blocks.1.hook_mlp_out"]


def shorten(arrays: Arrays) -> None:
    arrays["blocks.1.hook_mlp_out"] = arrays["blocks.1.hook_mlp_out"][:-1]


def poison(arrays: Arrays) -> None:
    arrays["ln_final.hook_out"][7, 7] = np.nan


def off_by_one_layer(arrays: Arrays) -> None:
    arrays["blocks.1.hook_resid_pre"] = arrays["blocks.0.hook_resid_pre"]


def half_a_stream(arrays: Arrays) -> None:
    arrays["blocks.1.hook_resid_mid"] = arrays["blocks.1.hook_attn_out"]


def summed_twice(arrays: Arrays) -> None:
    arrays["blocks.2.hook_resid_post"] = arrays["blocks.2.hook_resid_post"] * np.float32(1.91)


def swapped(arrays: Arrays) -> None:
    arrays["blocks.0.hook_attn_out"], arrays["blocks.0.hook_mlp_out"] = (
        arrays["blocks.0.hook_mlp_out"],
        arrays["blocks.0.hook_attn_out"],
    )


def scaled_behind_the_tap(arrays: Arrays) -> None:
    arrays["hook_embed"] = arrays["hook_embed"] / np.float32(2)


def one_foreign_row(arrays: Arrays) -> None:
    arrays["blocks.1.hook_attn_out"][5] = arrays["blocks.1.hook_attn_out"][6]


@pytest.mark.parametrize("tolerance, dtype", [(1e-4, torch.float32), (5e-2, torch.bfloat16)], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "plant, complaint",
    [
        (drop, "blocks.1.hook_mlp_out fired for 0 of 8 tokens"),
        (shorten, "blocks.1.hook_mlp_out fired for 7 of 8 tokens"),
        (poison, "ln_final.hook_out is not finite"),
        (off_by_one_layer, "blocks.1.hook_resid_pre differs from blocks.0.hook_resid_post"),
        (half_a_stream, "blocks.1.hook_resid_mid differs"),
        (summed_twice, "blocks.2.hook_resid_post differs"),
        (swapped, "blocks.0.hook_resid_mid differs"),
        (scaled_behind_the_tap, "blocks.0.hook_resid_pre differs from hook_embed"),
        (one_foreign_row, "blocks.1.hook_resid_mid differs"),
    ],
)
def test_planted_faults_are_found(
    plant: Callable[[Arrays], None], complaint: str, tolerance: float, dtype: torch.dtype
) -> None:
    arrays = right_arrays()
    plant(arrays)
    complaints = found(arrays, tolerance, dtype)
    assert any(text.startswith(complaint) for text in complaints), complaints


def test_a_replayed_step_is_not_counted_as_rows() -> None:
    rows = JobRows("check")
    for name, array in right_arrays().items():
        rows.add(name, 0, torch.from_numpy(array))
    rows.add("hook_embed", 0, torch.zeros(1, WIDTH))
    assert problems(rows, HOOKS, LENGTH, 1e-4) == ["hook_embed fired for 9 of 8 tokens"]


def test_an_engine_with_a_silent_tap_does_not_serve(tiny_llama: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.silent_tap", str(tiny_llama), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    assert "refused:" in done.stdout and "blocks.0.hook_resid_post fired for 0 of 8 tokens" in done.stdout
