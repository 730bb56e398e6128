"""Between a generation's sampling document and vLLM: its parameters, what it gave, and who hears of it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lenspool.errors import EngineFailed
from lenspool.logprobs import Logprobs

GREEDY: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
"""How a capture runs: its prompt, and nothing more."""


@dataclass
class Follower:
    """Who hears of a generation's tokens while it runs, if anyone.

    Attributes
    ----------
    wanted
        Someone listens.
    tell
        Called, while someone does, with all tokens so far and all text so far that no stop string can take back.
    ask
        Set by the engine while the generation runs: called when someone begins to listen.
    """

    tell: Callable[[Sequence[int], str], None]
    wanted: bool = False
    ask: Callable[[], None] | None = None

    def begin(self) -> None:
        """Someone listens from now on."""
        if not self.wanted:
            self.wanted = True
            if self.ask is not None:
                self.ask()


def parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` for a canonical sampling document."""
    from vllm.sampling_params import StructuredOutputsParams

    given = {name: value for name, value in sampling.items() if name not in ("logit_bias", "json_schema")}
    biases = dict(sampling.get("logit_bias", ()))
    schema = sampling.get("json_schema")
    return {
        **given,
        "structured_outputs": None if schema is None else StructuredOutputsParams(json=dict(schema)),
        "stop": sampling.get("stop") or None,
        "logit_bias": biases or None,
        "flat_logprobs": True,
    }


def generated(request: Any, output: Any, sampling: Mapping[str, Any], *, has_text: bool) -> dict[str, Any]:
    """What the store keeps of a generation, from vLLM's `RequestOutput` and its `CompletionOutput`."""
    made = {
        "token_ids": list(output.token_ids),
        "text": output.text if has_text else None,
        "finish_reason": output.finish_reason,
    }
    if "logprobs" in sampling:
        made["logprobs"] = _arrays(output.logprobs, len(output.token_ids), sampling["logprobs"]).to_document()
    if "prompt_logprobs" in sampling:
        count = len(request.prompt_token_ids) - 1
        made["prompt_logprobs"] = _arrays(request.prompt_logprobs, count, sampling["prompt_logprobs"]).to_document()
    return made


def _arrays(flat: Any, count: int, k: int) -> Logprobs:
    """Arrays of `count` tokens from vLLM's `FlatLogprobs`, where each is followed by the `k` likeliest.

    Raises
    ------
    EngineFailed
        It is not about that many tokens.
    """
    shape = (-1, k + 1)
    tokens = np.array(flat.token_ids, dtype=np.int32).reshape(shape)
    values = np.array(flat.logprobs, dtype=np.float32).reshape(shape)
    ranks = np.array(flat.ranks, dtype=np.int32).reshape(shape)[:, 0]
    if len(tokens) != count:
        raise EngineFailed(f"log-probabilities of {len(tokens)} tokens instead of {count}")
    return Logprobs(tokens[:, 0], values[:, 0], ranks, tokens[:, 1:], values[:, 1:])
