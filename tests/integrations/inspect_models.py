"""Models of inspect on a pool, and what transformers makes of the same chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from inspect_ai.model import (
    Model,
    get_model,
)

from lenspool import Client
from lenspool.integrations.inspect import registry

HOOK = "blocks.12.hook_out"


def model_of(client: Client, **arguments: Any) -> Model:
    assert registry.lenspool
    return get_model(f"lenspool/{client.model}", base_url=client.url, memoize=False, **arguments)


class Reference:
    """transformers in float32, with the model's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def chat(self, *messages: tuple[str, str]) -> list[int]:
        told = [{"role": role, "content": content} for role, content in messages]
        ids: list[int] = self.tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
        return ids

    @torch.no_grad()
    def run(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits `[tokens, vocabulary]`, and the outputs of the blocks but the last `[layers - 1, tokens, width]`."""
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].numpy(), torch.cat(out.hidden_states[1:-1]).numpy()

    @torch.no_grad()
    def greedy(self, ids: list[int], count: int, layer: int | None = None, vector: np.ndarray | None = None) -> str:
        """Text of greedy tokens; with a vector added to the output of a block, at every position."""

        def steer(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
            return out + torch.from_numpy(vector)

        handle = None if layer is None else self.model.model.layers[layer].register_forward_hook(steer)
        try:
            out = self.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
        finally:
            if handle is not None:
                handle.remove()
        text: str = self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)
        return text


def adapted(smollm2: Path, tokenizer: Any) -> tuple[Any, Any]:
    """TransformerLens's adapter for the model, and its tokenizer as it wants it."""
    from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_config_from_hf, configure_tokenizer
    from transformer_lens.model_bridge.sources._hf_format import determine_architecture_from_hf_config

    config = transformers.AutoConfig.from_pretrained(smollm2)
    architecture = determine_architecture_from_hf_config(config)
    bridge_config = build_bridge_config_from_hf(config, architecture, str(smollm2), torch.float32)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(bridge_config)
    return adapter, configure_tokenizer(tokenizer, adapter.cfg)
