"""A model that takes a second to load, and whose logits still differ from token to token."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 1000


def save(folder: Path) -> Path:
    """Write a random Llama of 4 layers, d_model 128, 4 heads and 2 KV heads, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,  # large enough for attention and logits that differ from token to token
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
