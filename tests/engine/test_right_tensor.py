"""A name is the tensor that it says: the right layer, and the whole of the stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from lenspool_cache import Store
from tests.engine.asking import Asker, Prompts, relative

LAYERS = 30


async def test_resid_post_is_the_next_hidden_state(engine: Asker, smollm2: Path, prompts: Prompts) -> None:
    """`resid_post.k` is `hidden_states[k + 1]`, which transformers itself numbers; the last is normed there."""
    (prompt,) = prompts([25])
    model = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
    names = [f"blocks.{i}.hook_resid_{at}" for i in range(LAYERS) for at in ("pre", "post")]
    rows = await engine.capture(prompt, [*names, "ln_final.hook_out"])
    for layer in range(LAYERS):
        assert relative(rows[f"blocks.{layer}.hook_resid_pre"], states[layer][0].numpy()) <= 1e-5
        if layer < LAYERS - 1:
            assert relative(rows[f"blocks.{layer}.hook_resid_post"], states[layer + 1][0].numpy()) <= 1e-5
            assert relative(rows[f"blocks.{layer}.hook_resid_post"], states[layer][0].numpy()) > 1e-3
    assert relative(rows["ln_final.hook_out"], states[LAYERS][0].numpy()) <= 1e-5


async def test_a_matched_edit_is_matched_to_the_whole_stream(engine: Asker, store: Store, prompts: Prompts) -> None:
    """vLLM has the stream in two halves, either of which has another norm."""
    (prompt,) = prompts([20])
    direction = np.random.default_rng(2).normal(0, 1, 576).astype(np.float32)
    value = {"array": store.put_array(direction)}
    for hook in ("blocks.15.hook_resid_pre", "blocks.15.hook_resid_mid", "blocks.15.hook_resid_post"):
        plain = (await engine.capture(prompt, [hook]))[hook].astype(np.float64)
        norms = np.linalg.norm(plain, axis=1)
        edit = {"hook": hook, "op": "steer", "coefficient": 0.5, "value": value, "ranges": [[0, len(prompt)]]}
        match = (await engine.capture(prompt, [hook], edits=[{**edit, "norm": "match"}]))[hook]
        moved = np.linalg.norm(match - plain, axis=1)
        assert np.abs(moved / (0.5 * norms) - 1).max() <= 1e-4
        keep = (await engine.capture(prompt, [hook], edits=[{**edit, "norm": "preserve"}]))[hook]
        assert np.abs(np.linalg.norm(keep, axis=1) / norms - 1).max() <= 1e-5
        assert relative(keep, plain.astype(np.float32)) > 1e-5
