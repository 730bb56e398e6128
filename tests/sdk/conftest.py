"""A card and a tokenizer to check requests against, without a pool."""

from __future__ import annotations

import pytest

from lenspool.card import HookInfo, ModelCard

LAYERS, WIDTH, VOCAB = 4, 16, 100
SERVED = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")


@pytest.fixture(scope="session")
def card() -> ModelCard:
    hooks = {"hook_embed": HookInfo("hook_embed", WIDTH, True)}
    for layer in range(LAYERS):
        for name in SERVED:
            full = f"blocks.{layer}.{name}"
            hooks[full] = HookInfo(full, WIDTH, True)
    hooks["ln_final.hook_out"] = HookInfo("ln_final.hook_out", WIDTH, True)
    hooks["unembed.hook_out"] = HookInfo("unembed.hook_out", VOCAB, False, ("pos", "d_vocab"))
    return ModelCard(
        id="tiny@0123456789ab",
        name="tiny",
        context={"model": "0" * 64, "numerics": {"dtype": "float32"}, "vocabulary": 1},
        architecture="LlamaForCausalLM",
        n_layers=LAYERS,
        d_model=WIDTH,
        n_heads=2,
        n_kv_heads=1,
        d_head=8,
        d_mlp=32,
        vocab_size=VOCAB,
        max_model_len=64,
        dtype="float32",
        hooks=hooks,
    )
