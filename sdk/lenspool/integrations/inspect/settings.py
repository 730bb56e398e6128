"""What of inspect's GenerateConfig is served, and how; nothing that is set is dropped without a word."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from inspect_ai.model import GenerateConfig

from lenspool.errors import InvalidJob

log = logging.getLogger(__name__)

MAX_TOKENS = 2048
"""Tokens of a generation for which nothing is said, as in inspect's own providers."""

TEMPERATURE = 1.0
"""Temperature where nothing is said: vLLM's, and that of the APIs that inspect is made for."""

SERVED: dict[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop_seqs": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "prompt_logprobs": "prompt_logprobs",
}
"""Field -> argument of `lenspool.sampling.Sampling`; besides `max_tokens`, `num_choices`, `logprobs`, `top_logprobs`,
`response_schema`, `extra_body`.
"""

EXTRAS = ("min_tokens", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
"""Sampling arguments that inspect has no field for, and that `extra_body` may hold."""

REFUSED: dict[str, Callable[[Any], bool]] = {
    "best_of": lambda value: value > 1,
    "modalities": lambda value: bool(value),
}
"""Fields whose loss would change what an answer means -> whether a value asks for that."""

INSPECTS_OWN = {
    "max_retries",
    "timeout",
    "attempt_timeout",
    "stream_idle_timeout",
    "max_connections",
    "adaptive_connections",
    "system_message",
    "max_tool_output",
    "internal_tools",
    "reasoning_history",
    "fail_on_refusal",
    "cache",
}
"""Fields that inspect itself acts on, before or after a provider is asked."""

_MORE = {"max_tokens", "num_choices", "logprobs", "top_logprobs", "response_schema", "extra_body"}
_warned: set[str] = set()


def sampling_of(config: GenerateConfig, extras: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Arguments of `Client.generate` for a config.

    Parameters
    ----------
    extras
        Those of `EXTRAS` that were given.
    room
        Tokens that the model's context has left; more are not asked for.

    Returns
    -------
    dict
        With a seed in any case: one is drawn for sampling without, so that the answer can be had again.

    Raises
    ------
    InvalidJob
        A field is set that cannot be served.
    """
    for name, asks in REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and asks(value):
            raise InvalidJob(name, "cannot be served by lenspool", "leave it out")
    _warn(config)
    given = {ours: getattr(config, name) for name, ours in SERVED.items() if getattr(config, name) is not None}
    given = {"temperature": TEMPERATURE, **given, **extras}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # two words for all tokens
    given["max_tokens"] = min(wanted_tokens(config), room)
    if config.logprobs or config.top_logprobs:
        given["logprobs"] = config.top_logprobs or 0
    if config.response_schema is not None:
        given["json_schema"] = config.response_schema.json_schema.model_dump(exclude_none=True)
    if given["temperature"] and "seed" not in given:
        given["seed"] = secrets.randbits(62)
    return given


def wanted_tokens(config: GenerateConfig) -> int:
    """Tokens that a config asks for at most."""
    return MAX_TOKENS if config.max_tokens is None else config.max_tokens


def _warn(config: GenerateConfig) -> None:
    """Say once in a process which fields have no effect here."""
    known = SERVED.keys() | REFUSED.keys() | INSPECTS_OWN | _MORE
    for name in config.model_dump(exclude_none=True):
        if name not in known:
            warn(name)


def warn(name: str) -> None:
    """Say, once in a process, that something has no effect here."""
    if name not in _warned:
        _warned.add(name)
        log.warning("lenspool serves no %s: it has no effect", name)
