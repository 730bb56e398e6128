"""What the storm asks, no question twice, and what transformers says to it."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from lenspool import Client, scale
from tests.tiny_llama import VOCABULARY

TOLERANCE = 1e-5
EDITED, FACTOR = "resid_post.0", 0.5


class Questions:
    """Questions to a tiny Llama, and its answers.

    Parameters
    ----------
    folder
        The model.
    seed
        Of all prompts.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        torch.set_num_threads(1)  # the workers have the cores
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = model.eval()
        self._rng = random.Random(seed)
        self._thread = ThreadPoolExecutor(1)
        self._asked = 0

    async def ask(self, client: Client) -> str | None:
        """Ask something new; what is wrong with the answer, or None."""
        self._asked += 1
        tokens = [self._rng.randrange(1, VOCABULARY) for _ in range(self._rng.randrange(3, 60))]
        kind = self._rng.choice(["capture", "edited", "generate"])
        loop = asyncio.get_running_loop()
        if kind == "generate":
            count = self._rng.randrange(5, 120)
            generation = await client.generate(tokens, max_tokens=count, ignore_eos=True, hooks="resid_post.3")
            if generation.prompt_token_ids != tokens or len(generation.token_ids) != count:
                return f"{kind}: other tokens than asked for"
            rows, sequence = generation["resid_post.3"], tokens + list(generation.token_ids)
            return await loop.run_in_executor(self._thread, self._wrong, kind, sequence[:-1], 1.0, rows, len(tokens))
        edits = [scale(EDITED, FACTOR)] if kind == "edited" else []
        capture = await client.capture(tokens, "resid_post.3", interventions=edits)
        factor = FACTOR if edits else 1.0
        return await loop.run_in_executor(
            self._thread, self._wrong, kind, tokens, factor, capture["resid_post.3"], None
        )

    def _wrong(self, kind: str, tokens: list[int], factor: float, rows: Any, prompt: int | None) -> str | None:
        """Compare rows, and of a generation each token with the largest logit before it."""

        def edit(module: Any, arguments: Any, output: Any) -> Any:
            return output * factor if torch.is_tensor(output) else (output[0] * factor, *output[1:])

        ends: list[torch.Tensor] = []
        layers = self._model.model.layers
        hooks = [
            layers[0].register_forward_hook(edit),
            layers[3].register_forward_hook(lambda m, a, out: ends.append(out if torch.is_tensor(out) else out[0])),
        ]
        try:
            with torch.no_grad():
                logits = self._model(torch.tensor([tokens])).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        expected, got = ends[0][0].numpy(), np.asarray(rows)
        if got.shape != expected.shape:
            return f"{kind}: shape {got.shape}, not {expected.shape}"
        error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
        if not error <= TOLERANCE:
            return f"{kind}: relative error {error:.1e}"
        if prompt is not None:
            chosen = torch.tensor(tokens[prompt:])
            before = logits[prompt - 1 : len(tokens) - 1]
            short = before.max(-1).values - before.gather(-1, chosen[:, None])[:, 0]
            if float(short.max()) > 1e-4:
                return f"{kind}: a token that is not the most likely one"
        return None
