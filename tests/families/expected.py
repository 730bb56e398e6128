"""What transformers says of one family; computed before vLLM changes transformers' classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from lenspool.hooks import template
from lenspool.vocabulary import BY_NAME
from tests.families.checkpoints import VOCABULARY, make
from tests.families.identities import Weights
from tests.families.reference import Reference

LENGTHS = (21, 13, 6)
GENERATED = 12
CROWD, CROWD_GENERATED = (29, 30, 31, 26, 28, 21), 16
SHARED, ENDS = 64, (7, 11)
EDITED = (4, 9)
FACTOR = 1.5
HALF = ("Llama", "Gemma-2")
"""Families that are measured in bfloat16."""


@dataclass(frozen=True)
class Run:
    """A prompt, its greedy continuation, and all hooks at all positions that were run: all but the last token."""

    prompt: list[int]
    generated: list[int]
    rows: dict[str, np.ndarray]


class Expected:
    """All runs of one family.

    Attributes
    ----------
    plain, continued
        Prompts of a few tokens, without and with a continuation.
    edited
        Hook of layer 1, or of no layer -> the first prompt after `FACTOR` times a vector was added there.
    crowd
        More than a small cache holds.
    sharing
        Prompts that begin alike.
    half
        The plain prompts in transformers' own bfloat16.
    cache_groups
        Groups of layers among which vLLM divides the blocks of its cache: as many layers in each as there are of the
        rarest kind of attention.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        model = make(name, folder)
        kinds = getattr(model.config, "layer_types", None) or ["all"]
        self.cache_groups = len(kinds) // min(kinds.count(kind) for kind in kinds)
        self.weights = Weights(model)
        self._reference = Reference(model)
        self._random = np.random.default_rng(0)
        prompts = [self._tokens(length) for length in LENGTHS]
        self.plain = [self._run(prompt) for prompt in prompts]
        self.continued = [self._run(prompt, GENERATED) for prompt in prompts]
        self.crowd = [self._run(self._tokens(length), CROWD_GENERATED) for length in CROWD]
        shared = self._tokens(SHARED)
        self.sharing = [self._run([*shared, *self._tokens(length)], 4) for length in ENDS]
        self.vectors: dict[str, np.ndarray] = {}
        self.edited: dict[str, Run] = {}
        for hook, rows in self.plain[0].rows.items():
            if BY_NAME[template(hook)].editable and (not hook.startswith("blocks.") or hook.startswith("blocks.1.")):
                self.vectors[hook] = (self._random.standard_normal(rows.shape[1]) * rows.std()).astype(np.float32)
                self.edited[hook] = self._edit(hook)
        self.half: list[Run] = []
        if name in HALF:
            low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
            reference = Reference(low.eval())
            self.half = [Run(prompt, [], reference.run(prompt)) for prompt in prompts]

    def _tokens(self, length: int) -> list[int]:
        return [int(t) for t in self._random.integers(3, VOCABULARY, length)]

    def _run(self, prompt: Sequence[int], count: int = 0) -> Run:
        tokens = list(prompt)
        rows = self._reference.run(tokens)
        for turn in range(count):
            tokens.append(int(rows["unembed.hook_out"][-1].argmax()))
            if turn < count - 1:
                rows = self._reference.run(tokens)
        return Run(list(prompt), tokens[len(prompt) :], rows)

    def _edit(self, hook: str) -> Run:
        change = FACTOR * torch.from_numpy(self.vectors[hook])
        prompt = self.plain[0].prompt
        return Run(prompt, [], self._reference.run(prompt, [(hook, lambda rows: rows + change, EDITED)]))
