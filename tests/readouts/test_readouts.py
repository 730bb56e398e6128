"""Readouts of tiny models: equal to the same operation on the whole capture, and to transformers in float32."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.readouts import program
from tests.readouts.program import FEATURES, IDS, LENS, MATRIX, MODELS, PROMPT, SAE, STREAM, THRESHOLD

TOLERANCE = 2e-5
"""Relative L2; what transformers and vLLM differ by in float32, over a few layers."""


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target = tmp_path_factory.mktemp("readouts") / "out.pickle"
    command = [sys.executable, "-m", "tests.readouts.program", str(target)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ.copy(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    out: dict[str, Any] = pickle.loads(target.read_bytes())
    return out


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, found: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = found[request.param]
    return out


def close(got: np.ndarray, want: Any, tolerance: float = TOLERANCE) -> None:
    want = np.asarray(want, dtype=np.float64)
    assert got.shape == want.shape and got.dtype == np.float32
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= tolerance * max(float(np.linalg.norm(want)), 1e-6)


def exact(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got == want).all()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check_logits(read: dict[str, Any], suffix: str, logits: np.ndarray, tolerance: float) -> None:
    """Every readout of logits, against logits."""
    log_p = log_softmax(logits)
    top = read["top_k" + suffix]
    assert top["indices"].dtype == np.int32
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : top["values"].shape[1]]
    exact(top["indices"], order.astype(np.int32))
    close(top["values"], np.take_along_axis(logits, order, -1), tolerance)
    close(read["logprobs" + suffix], log_p[:, IDS], tolerance)
    close(read["logits_of" + suffix], logits[:, IDS], tolerance)
    exact(read["rank" + suffix], (logits[:, None, :] > logits[:, IDS, None]).sum(-1).astype(np.int32))
    close(read["entropy" + suffix], -(np.exp(log_p) * log_p).sum(-1), 10 * tolerance)


def test_logits_equal_the_whole_capture_and_transformers(model: dict[str, Any]) -> None:
    check_logits(model["readouts"], "", model["whole"]["unembed.hook_out"], 1e-6)
    check_logits(model["readouts"], "", model["transformers"]["logits"], TOLERANCE)


def test_loss_is_about_the_next_prompt_token(model: dict[str, Any]) -> None:
    loss = model["readouts"]["loss"]
    logits = torch.from_numpy(model["transformers"]["logits"])
    want = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(PROMPT[1:]), reduction="none")
    close(loss, want.numpy())
    assert len(loss) == len(PROMPT) - 1


@pytest.mark.parametrize("hook", [f"blocks.{layer}.hook_resid_post" for layer in (0, 2)])
def test_lens_equals_transformers_own_norm_and_head(model: dict[str, Any], hook: str) -> None:
    check_logits(model["readouts"], f" of {hook}", model["transformers"][hook], TOLERANCE)


def test_lens_of_the_last_stream_gives_the_logits(model: dict[str, Any]) -> None:
    check_logits(model["readouts"], " of blocks.2.hook_resid_post", model["whole"]["unembed.hook_out"], 1e-6)


def test_every_hook_of_the_stream_has_a_lens(model: dict[str, Any]) -> None:
    for name in LENS:
        value = model["readouts"][name]
        rows = value["values"] if isinstance(value, dict) else value
        assert len(rows) == len(PROMPT) and np.isfinite(rows).all()


def test_readouts_of_a_hook_equal_the_same_operation_on_it(model: dict[str, Any]) -> None:
    read, whole = model["readouts"], model["whole"]
    rows, heads = whole[STREAM], whole["blocks.1.attn.hook_z"]
    features = whole["blocks.2.mlp.hook_post"]
    order = np.argsort(-features, axis=-1, kind="stable")[:, :3]
    exact(read["top_k of features"]["values"], np.take_along_axis(features, order, -1))
    exact(read["top_k of features"]["indices"], order.astype(np.int32))
    close(read["norm"], np.linalg.norm(rows, axis=-1), 1e-6)
    close(read["norm of logits"], np.linalg.norm(whole["unembed.hook_out"], axis=-1), 1e-6)
    close(read["norm per head"], np.linalg.norm(heads.reshape(len(heads), -1), axis=-1), 1e-6)
    close(read["project"], rows @ MATRIX, 1e-6)
    close(read["project on a vector"], rows @ MATRIX[:, :1], 1e-6)
    close(read["mean"], rows.mean(0), 1e-6)
    exact(read["max"], rows.max(0))
    assert read["mean per head"].shape == heads.shape[1:]
    close(read["mean per head"], heads.mean(0), 1e-6)
    exact(read["max of logits"], whole["unembed.hook_out"].max(0))
    close(read["mean of heads' results"], whole["blocks.0.attn.hook_result"].mean(0), 1e-5)


def dense(features: dict[str, np.ndarray]) -> np.ndarray:
    """Sparse features as `[rows, features]`; no place may be named twice."""
    out = np.zeros((len(features["values"]), FEATURES), np.float32)
    for row, (indices, values) in enumerate(zip(features["indices"], features["values"], strict=True)):
        here = indices[indices >= 0]
        assert len(set(here)) == len(here) and (values[indices < 0] == 0).all()
        assert (np.diff(values) <= 0).all()
        out[row, here] = values[indices >= 0]
    return out


def test_features_of_sparse_autoencoders(model: dict[str, Any]) -> None:
    read, rows = model["readouts"], model["whole"][STREAM].astype(np.float64)
    before = (rows - SAE["b_dec"]) @ SAE["W_enc"] + SAE["b_enc"]
    relu = np.maximum(before, 0)
    close(dense(read["relu"]), relu, 1e-5)
    exact(read["relu"]["active"], (relu > 0).sum(-1).astype(np.int32))
    jump = np.where(before > THRESHOLD, relu, 0)
    assert 0 < (jump > 0).sum() < (relu > 0).sum()
    close(dense(read["jumprelu"]), jump, 1e-5)
    exact(read["jumprelu"]["active"], (jump > 0).sum(-1).astype(np.int32))
    few = np.sort(relu, -1)[:, :-7:-1]
    close(read["topk"]["values"], few, 1e-5)
    exact(read["topk"]["indices"], np.argsort(-before, -1)[:, :6].astype(np.int32))
    assert (read["topk"]["active"] == 6).all()
    # without b_dec; what was left out is counted
    plain = np.maximum(rows @ SAE["W_enc"] + SAE["b_enc"], 0)
    close(read["relu, few"]["values"], np.sort(plain, -1)[:, :-7:-1], 1e-5)
    exact(read["relu, few"]["active"], (plain > 0).sum(-1).astype(np.int32))
    assert (read["relu, few"]["active"] > 6).all()


def test_few_numbers_are_stored_and_found_again(model: dict[str, Any]) -> None:
    cached, topk, reused = model["again"]
    assert cached and reused == model["computed"] + len(PROMPT)  # the stream itself came with the whole captures
    exact(topk["indices"], model["readouts"]["topk"]["indices"])
    values = model["readouts"].values()
    numbers = [array for value in values for array in (value.values() if isinstance(value, dict) else [value])]
    assert model["bytes"] == sum(array.nbytes for array in numbers)
    assert model["held"] == 0


def test_rows_that_are_there_are_not_computed_again(model: dict[str, Any]) -> None:
    entries = 2 + 2 * 3  # indices and values, of the logits and of three layers
    assert model["reuse"] == (3 * entries, (len(PROMPT) - 3) * entries, 3 * entries)
    first_top, first_lens, top, lens = model["reused"]
    for part in ("indices", "values"):
        exact(first_top[part], top[part][[2, 3, 15]])
        exact(first_lens[part], lens[part][[2, 3, 15]])


def test_readouts_show_interventions(model: dict[str, Any]) -> None:
    lens, norm, rows = model["edited"]
    close(norm, np.linalg.norm(rows, axis=-1), 1e-6)
    close(lens, model["edited, transformers"][:, IDS])
    unedited = model["readouts"]["norm"]
    changed = np.abs(norm - unedited) > 1e-3 * unedited
    assert changed[4:7].any() and not changed[:4].any()


def test_generations(model: dict[str, Any]) -> None:
    tokens, (top, loss, mean, rows, lens) = model["generated"]
    n = len(PROMPT)
    assert top["indices"][n - 1 :, 0].tolist() == tokens  # greedy
    assert len(rows) == len(top["values"]) == len(lens["indices"]) == n + 3
    close(mean, rows.mean(0), 1e-6)
    close(loss, model["readouts"]["loss"])  # of the prompt's tokens only
    entropy, logits, largest = model["later"]
    assert len(entropy) == 3
    log_p = log_softmax(logits)
    close(entropy, -(np.exp(log_p) * log_p).sum(-1), 1e-5)
    close(largest, rows[n:].max(0))


def test_generation_without_rows(model: dict[str, Any]) -> None:
    top, entropy, mean = model["nothing"]
    assert top["values"].shape == (0, 3) and top["indices"].dtype == np.int32
    assert entropy.shape == (0,)
    assert mean.shape == (program.WIDTH,) and np.isnan(mean).all()


def test_arrays_are_checked_by_the_worker(model: dict[str, Any]) -> None:
    assert model["refusals"]["shape"] == "InvalidJob: project.matrix: has shape (5, 4) (allowed: (128, 4))"
