"""From generations to inspect's ModelOutput: messages, stop reasons, log-probabilities, usage, activations inline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    Content,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelUsage,
    StopReason,
    TopLogprob,
)
from inspect_ai.model._reasoning import parse_content_with_reasoning
from inspect_ai.tool import ToolInfo

from lenspool import logprobs as lp
from lenspool.errors import InvalidJob
from lenspool.generation import Generation
from lenspool.integrations.inspect.tool_calls import find_calls
from lenspool.integrations.wire import KINDS, encode_array
from lenspool.tokenizer import Tokenizer

LOGITS = "unembed.hook_out"


def choice_of(
    generation: Generation,
    tokenizer: Tokenizer,
    tools: Sequence[ToolInfo],
    model: str,
    config: GenerateConfig,
    *,
    full: bool,
) -> ChatCompletionChoice:
    """One choice.

    Parameters
    ----------
    config
        Says how many alternatives are shown for each token.
    full
        Whether the limit of the generation is the end of the model's context.
    """
    text, calls = find_calls(generation.text or "", tools) if tools else (generation.text or "", [])
    rest, reasoning = parse_content_with_reasoning(text)
    content: str | list[Content] = text
    if reasoning is not None:
        content = [ContentReasoning(reasoning=reasoning.reasoning), ContentText(text=rest)]
    alternatives = config.prompt_logprobs or 0  # inspect: of 1, the tokens alone
    message = ChatMessageAssistant(content=content, tool_calls=calls or None, model=model, source="generate")
    return ChatCompletionChoice(
        message=message,
        stop_reason="tool_calls" if calls else _stop_reason(generation.finish_reason, full=full),
        logprobs=_logprobs(generation.logprobs, tokenizer, config.top_logprobs or 0),
        prompt_logprobs=_logprobs(generation.prompt_logprobs, tokenizer, alternatives if alternatives > 1 else 0),
    )


def _stop_reason(finish: str, *, full: bool) -> StopReason:
    if finish == "length":
        return "model_length" if full else "max_tokens"
    return "stop" if finish == "stop" else "unknown"


def _logprobs(told: lp.Logprobs | None, tokenizer: Tokenizer, top: int) -> Logprobs | None:
    if told is None:
        return None
    strings = tokenizer.tokens(told.token_ids.tolist())
    content = []
    for i, text in enumerate(strings):
        likeliest = None
        if top:
            ids = told.top_token_ids[i, :top].tolist()
            values = told.top_logprobs[i, :top].tolist()
            likeliest = [TopLogprob(token=t, logprob=v) for t, v in zip(tokenizer.tokens(ids), values, strict=True)]
        content.append(Logprob(token=text, logprob=float(told.logprobs[i]), top_logprobs=likeliest))
    return Logprobs(content=content)


def usage_of(generations: Sequence[Generation]) -> ModelUsage:
    """Tokens of the prompt, once, and of all choices."""
    read = len(generations[0].prompt_token_ids)
    written = sum(len(generation.token_ids) for generation in generations)
    return ModelUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)


def check_inline(hooks: Sequence[str], keys: Mapping[str, str]) -> None:
    """Refuse hooks that have no wire key.

    Parameters
    ----------
    keys
        Wire key -> canonical hook, of the model.
    """
    for hook in hooks:
        if hook not in keys.values():
            raise InvalidJob("capture", f"{hook} has no form inline", f"{', '.join(KINDS)}; or by reference")


def inline(generation: Generation, keys: Mapping[str, str]) -> dict[str, Any]:
    """Captured rows in wire form, as float32, by wire key."""
    captured = set(generation.hooks)
    return {key: encode_array(generation.numpy(hook)) for key, hook in keys.items() if hook in captured}


def forward(generation: Generation, hooks: Mapping[str, str], logits: bool) -> dict[str, Any]:
    """Metadata of a forward run in wire form: rows by wire key, and with `logits` those of every position."""
    metadata: dict[str, Any] = {
        "activations": {key: encode_array(generation.numpy(hook)) for key, hook in hooks.items()}
    }
    return metadata | ({"tl_logits": encode_array(generation.numpy(LOGITS))} if logits else {})
