"""Sampling arguments of a generation: checked, and in one canonical form, which is part of the content key."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

import numpy as np

from lenspool.card import ModelCard
from lenspool.errors import InvalidJob

MAX_LOGPROBS = 2**22
"""Numbers that the log-probabilities of one generation may have."""
_LOGIT_BYTES = 2**30
"""Bytes of logits that vLLM may build at once for the log-probabilities of a prompt."""
_SCHEMA_BYTES = 100_000


class Sampling(TypedDict, total=False):
    """How tokens are chosen, and what is told of it. Everything is part of the result's identity.

    Attributes
    ----------
    max_tokens, min_tokens
        Tokens to generate; before `min_tokens` neither the end of text nor a stop ends it. Default 16 and 0.
    temperature
        0 to 2; 0, the default, is greedy, which ignores `top_p`, `top_k`, `min_p` and `seed`.
    top_p, top_k, min_p
        Tokens that are kept: the likeliest that together have `top_p`, the `top_k` likeliest (0 is off), those with at
        least `min_p` of the likeliest one's probability. Default 1, 0 and 0: all.
    seed
        Makes sampling repeatable, whatever else is in the batch. Without one each call draws anew.
    stop
        A string or several; the text ends in front of the first that is generated, the token ids behind it.
    stop_token_ids
        Token ids that end the generation, like the model's own end of text; the last token id is the one that did.
    ignore_eos
        Go on behind the end of text.
    frequency_penalty, presence_penalty
        -2 to 2: what is taken from a token's logit for each time, or once, that it has been generated. Default 0.
    repetition_penalty
        Above 0, up to 10: what logits of tokens in prompt or generation are divided by (multiplied, when negative).
        Default 1.
    logit_bias
        Token id -> what is added to its logit, -100 to 100.
    json_schema
        The text is JSON of this schema: tokens that would break it are not drawn, and `logprobs` are those among the
        others. Default None.
    logprobs, prompt_logprobs
        Tell of each generated token, or of each prompt token but the first, its log-probability and those of the so
        many likeliest tokens in its place; 0 tells of the token alone. See `Logprobs`. Default None.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]]
    json_schema: Mapping[str, Any] | None
    logprobs: int | None
    prompt_logprobs: int | None


def sampling_document(**given: Unpack[Sampling]) -> dict[str, Any]:
    """Check sampling arguments and write them in canonical form.

    Greedy sampling drops what it does not use. Arguments from `min_tokens` on that have their default are left out.

    Raises
    ------
    InvalidJob
        A value is of a wrong type or out of range.
    TypeError
        There is no such argument.
    """
    if unknown := sorted(set(given) - Sampling.__annotations__.keys()):
        raise TypeError(f"sampling has no argument {unknown[0]!r}; it has {', '.join(Sampling.__annotations__)}")
    temperature = check_real("temperature", given.get("temperature", 0.0), 0.0, 2.0)
    greedy = temperature == 0
    top_p = check_real("top_p", given.get("top_p", 1.0), 0.0, 1.0, above=True)
    top_k = check_integer("top_k", given.get("top_k", 0), 0, None)
    min_p = check_real("min_p", given.get("min_p", 0.0), 0.0, 1.0)
    max_tokens = check_integer("max_tokens", given.get("max_tokens", 16), 1, None)
    seed = _optional("seed", given.get("seed"), 2**63 - 1)
    ignore_eos = given.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise InvalidJob("ignore_eos", f"got {ignore_eos!r}", "True or False")
    document = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": 1.0 if greedy else top_p,
        "top_k": 0 if greedy else top_k,
        "seed": None if greedy else seed,
        "stop": _stops(given.get("stop", ())),
        "ignore_eos": ignore_eos,
    }
    more: dict[str, Any] = {
        "min_tokens": check_integer("min_tokens", given.get("min_tokens", 0), 0, max_tokens),
        "min_p": 0.0 if greedy else min_p,
        "stop_token_ids": _token_ids(given.get("stop_token_ids", ())),
        "frequency_penalty": check_real("frequency_penalty", given.get("frequency_penalty", 0.0), -2.0, 2.0),
        "presence_penalty": check_real("presence_penalty", given.get("presence_penalty", 0.0), -2.0, 2.0),
        "logit_bias": _biases(given.get("logit_bias", ())),
        "json_schema": _schema(given.get("json_schema")),
    }
    document |= {name: value for name, value in more.items() if value}
    penalty = check_real("repetition_penalty", given.get("repetition_penalty", 1.0), 0.0, 10.0, above=True)
    document |= {} if penalty == 1 else {"repetition_penalty": penalty}
    told = {
        "logprobs": _optional("logprobs", given.get("logprobs"), None),
        "prompt_logprobs": _optional("prompt_logprobs", given.get("prompt_logprobs"), None),
    }
    return document | {name: count for name, count in told.items() if count is not None}


def check_sampling(sampling: Mapping[str, Any], n_prompt: int, card: ModelCard) -> None:
    """Check a canonical document against the model that is to run it.

    Raises
    ------
    InvalidJob
        A token id is outside the vocabulary, or more log-probabilities are wanted than the engine gives.
    """
    ids = {
        "stop_token_ids": sampling.get("stop_token_ids", []),
        "logit_bias": [token for token, _ in sampling.get("logit_bias", [])],
    }
    for field, tokens in ids.items():
        for token in tokens:
            if token >= card.vocab_size:
                raise InvalidJob(
                    field, f"token id {token} is outside the vocabulary", f"token ids 0..{card.vocab_size - 1}"
                )
    for field, rows in (("logprobs", sampling["max_tokens"]), ("prompt_logprobs", n_prompt - 1)):
        count = sampling.get(field)
        if count is None:
            continue
        advice = "lenspool.readouts.top_k of the logits has no such limit"
        if count > card.max_logprobs:
            raise InvalidJob(
                field, f"got {count}", f"at most {card.max_logprobs} (the engine's max_logprobs); {advice}"
            )
        if rows * (count + 1) > MAX_LOGPROBS:
            raise InvalidJob(field, f"asks for {rows * (count + 1)} numbers", f"at most {MAX_LOGPROBS}; {advice}")
        at_once = min(rows, card.max_batched_tokens) * card.vocab_size * 4
        if field == "prompt_logprobs" and at_once > _LOGIT_BYTES:
            raise InvalidJob(
                field,
                f"the engine would build {at_once} bytes of logits at once",
                f"at most {_LOGIT_BYTES}: a shorter prompt, an engine with smaller max_num_batched_tokens, or "
                "lenspool.readouts (loss, rank, top_k), which go chunk by chunk",
            )


def _stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [stop]
    if not all(isinstance(s, str) and s for s in stops):
        raise InvalidJob("stop", f"got {stop!r}", "a non-empty string or a list of them")
    return sorted(set(stops))


def _token_ids(ids: Any) -> list[int]:
    if not isinstance(ids, Iterable):
        raise InvalidJob("stop_token_ids", f"got {ids!r}", "a list of token ids")
    return sorted({check_integer("stop_token_ids", token, 0, None) for token in ids})


def _biases(biases: Any) -> list[list[Any]]:
    """Pairs of token id and bias, ascending; those of 0 are left out."""
    given: list[Any] = [None]
    if isinstance(biases, Iterable):
        given = list(biases.items() if isinstance(biases, Mapping) else biases)
    if any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in given):
        raise InvalidJob("logit_bias", f"got {biases!r}", "a mapping from token id to bias")
    found = {
        check_integer("logit_bias", token, 0, None): check_real("logit_bias", bias, -100.0, 100.0)
        for token, bias in given
    }
    if len(found) != len(given):
        raise InvalidJob("logit_bias", "a token id stands there twice", "each once")
    return [[token, bias] for token, bias in sorted(found.items()) if bias]


def _schema(schema: Any) -> dict[str, Any] | None:
    """The same as plain JSON."""
    allowed = f"a JSON schema: a non-empty object of at most {_SCHEMA_BYTES} bytes"
    if schema is None:
        return None
    if not isinstance(schema, Mapping) or not schema:
        raise InvalidJob("json_schema", f"got {type(schema).__name__}", allowed)
    try:
        text = json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob("json_schema", f"is not JSON: {error}", allowed) from None
    if len(text) > _SCHEMA_BYTES:
        raise InvalidJob("json_schema", f"has {len(text)} bytes", allowed)
    plain: dict[str, Any] = json.loads(text)
    return plain


def _optional(field: str, value: Any, high: int | None) -> int | None:
    return None if value is None else check_integer(field, value, 0, high)


def check_integer(field: str, value: Any, low: int, high: int | None) -> int:
    """The value as an int within bounds."""
    allowed = f"an int from {low}" + (f" to {high}" if high is not None else " up")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidJob(field, f"got {value!r}", allowed)
    if value < low or (high is not None and value > high):
        raise InvalidJob(field, f"got {value}", allowed)
    return int(value)


def check_real(field: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """The value as a finite float within bounds; -0.0 as 0.0."""
    allowed = f"a number {'above' if above else 'from'} {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidJob(field, f"got {value!r}", allowed)
    if not math.isfinite(value) or value > high or value < low or (above and value == low):
        raise InvalidJob(field, f"got {value}", allowed)
    return float(value) + 0.0
