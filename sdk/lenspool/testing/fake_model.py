"""What a fake pool serves: a card with every hook of a small Llama, and a tokenizer with a token for each byte."""

from __future__ import annotations

import json
import math
from functools import lru_cache

from lenspool.card import HookInfo, ModelCard
from lenspool.tokenizer import Tokenizer, from_bytes
from lenspool.vocabulary import HOOK_POINTS

_NOT_LLAMA = ("hook_pos_embed", "attn.hook_out", "mlp.hook_out")
_BYTES = 256


def fake_card(
    *,
    n_layers: int = 2,
    d_model: int = 16,
    n_heads: int = 2,
    n_kv_heads: int = 1,
    d_mlp: int = 32,
    vocab_size: int = 512,
    max_model_len: int = 1024,
    dtype: str = "float32",
    name: str = "fake",
) -> ModelCard:
    """A card with all hooks of a Llama of these sizes; `vocab_size` is 256 or more, for the tokens of bytes."""
    if vocab_size < _BYTES:
        raise ValueError(f"vocab_size is {vocab_size}, and the tokenizer needs {_BYTES}")
    d_head = d_model // n_heads
    sizes = {
        "d_model": d_model,
        "head": n_heads,
        "kv_head": n_kv_heads,
        "d_head": d_head,
        "d_mlp": d_mlp,
        "d_vocab": vocab_size,
        "1": 1,
        "k_pos": 0,
    }
    hooks: dict[str, HookInfo] = {}
    for point in HOOK_POINTS:
        inner = ("head", "k_pos") if "k_pos" in point.shape else point.shape[1:]
        if point.name.removeprefix("blocks.{layer}.") in _NOT_LLAMA or not sizes.keys() >= set(inner):
            continue
        dims = tuple(sizes[dim] for dim in inner)
        kind = "float32" if point.name.endswith("hook_scale") else None
        for layer in range(n_layers) if "{layer}" in point.name else [0]:
            full = point.name.replace("{layer}", str(layer))
            hooks[full] = HookInfo(full, math.prod(dims), point.editable, point.shape, dims, kind)
    return ModelCard(
        id=f"{name}@000000000000",
        name=name,
        context={"model": "0" * 64, "numerics": {"dtype": dtype}, "vocabulary": 1},
        architecture="LlamaForCausalLM",
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_mlp=d_mlp,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        hooks=hooks,
        tokenizer="bytes",
    )


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    """One token for each byte of UTF-8, with a chat template."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return from_bytes(json.dumps({"tokenizer": fast.to_str(), "chat_template": template}).encode())
