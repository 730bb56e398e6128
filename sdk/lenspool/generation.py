"""What a generation returns: text and tokens, with the activations that were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lenspool.card import ModelCard
from lenspool.logprobs import Logprobs
from lenspool.result import Capture


class Generation(Capture):
    """A generation, with the activations that were asked for.

    The row of position p is the one from which token p+1 is predicted; the last generated token has not been fed back,
    so it has no row.

    Attributes
    ----------
    text
        The generated text; None when the model has no tokenizer. Stop strings are not part of it.
    token_ids
        The generated token ids.
    prompt_token_ids
        The prompt's token ids.
    finish_reason
        `"stop"` (end of text, a stop string or a stop token) or `"length"`.
    logprobs, prompt_logprobs
        Log-probabilities of the generated tokens, and of the prompt's but the first; None when not asked for.
    """

    def __init__(self, card: ModelCard, *, generation: Mapping[str, Any], prompt: list[int], **rest: Any) -> None:
        super().__init__(card, token_ids=list(generation["token_ids"]), **rest)
        self.prompt_token_ids = prompt
        self.text: str | None = generation["text"]
        self.finish_reason: str = generation["finish_reason"]
        self.logprobs, self.prompt_logprobs = (
            Logprobs.from_document(generation[name]) if name in generation else None
            for name in ("logprobs", "prompt_logprobs")
        )

    @property
    def sequence(self) -> list[int]:
        """Token ids at all positions: those of the prompt and the generated ones."""
        return [*self.prompt_token_ids, *self.token_ids]
