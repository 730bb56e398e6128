"""Metrics: one number from what a run says at the last position of its prompt.

The worker computes what `logit_diff` and `prob` need, so that a run of a sweep leaves one or two numbers in the store;
`kl` and callables need all logits of the position.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lenspool.errors import InvalidJob
from lenspool.readouts import Readout, logits_of, logprobs
from lenspool.result import Capture

if TYPE_CHECKING:
    from lenspool.client import Client

Token = int | str
"""A token by its id, or as text that is exactly one token (mind the leading space: `" Paris"`)."""


@dataclass(frozen=True)
class Measure:
    """A metric for one prompt: what is captured of each run, at the last position, and the number it makes."""

    reads: tuple[Readout | str, ...]
    value: Callable[[Capture], float]


@dataclass(frozen=True)
class Metric:
    """A number of a run. Make it with the functions of this module.

    Attributes
    ----------
    prepare
        Client and the tokens of the run without edits -> `Measure`.
    """

    name: str
    prepare: Callable[[Client, list[int]], Awaitable[Measure]] = field(repr=False)


def logit_diff(a: Token, b: Token) -> Metric:
    """Logit of `a` minus logit of `b`, as the next token."""

    async def prepare(client: Client, tokens: list[int]) -> Measure:
        read = logits_of([await token_id(client, a), await token_id(client, b)])
        return Measure((read,), lambda run: float(run[read][-1, 0]) - float(run[read][-1, 1]))

    return Metric(f"logit_diff({a!r}, {b!r})", prepare)


def prob(token: Token) -> Metric:
    """Probability of a token as the next one."""

    async def prepare(client: Client, tokens: list[int]) -> Measure:
        read = logprobs([await token_id(client, token)])
        return Measure((read,), lambda run: float(np.exp(np.float64(run[read][-1, 0]))))

    return Metric(f"prob({token!r})", prepare)


async def _kl(client: Client, tokens: list[int]) -> Measure:
    """Of all logits in float64: sums of float32 over a vocabulary are off by 1e-3 nats, more than small effects are."""
    log_p = _log_softmax(await client.capture(tokens, "logits", positions="last"))
    p = np.exp(log_p)
    return Measure(("logits",), lambda run: float(p @ (log_p - _log_softmax(run))))


def _log_softmax(run: Capture) -> np.ndarray:
    logits = run["logits"][-1].astype(np.float64)
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())


kl = Metric("kl", _kl)
"""Kullback-Leibler divergence, in nats, of the next token's distribution from that of the run without edits (of a
patching sweep: the clean run)."""


def as_metric(metric: Any, field_: str = "metric") -> Metric:
    """A metric, or one that gives a callable the logits `[d_vocab]`, float32, of the last position."""
    if isinstance(metric, Metric):
        return metric
    if not callable(metric):
        raise InvalidJob(field_, f"got {metric!r}", "logit_diff(a, b), prob(token), kl, or a callable on logits")

    async def prepare(client: Client, tokens: list[int]) -> Measure:
        return Measure(("logits",), lambda run: float(metric(run["logits"][-1].astype(np.float32))))

    return Metric(getattr(metric, "__name__", type(metric).__name__), prepare)


async def token_id(client: Client, token: Token) -> int:
    """Id of a token.

    Raises
    ------
    InvalidJob
        Not exactly one token, or outside the vocabulary.
    """
    card, desk = await client._connect()
    tokenizer = desk.tokenizer
    if not isinstance(token, str):
        allowed = f"text of one token, or an id in 0..{card.vocab_size - 1}"
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool) or not 0 <= token < card.vocab_size:
            raise InvalidJob("metric", f"got the token {token!r}", allowed)
        return int(token)
    if tokenizer is None:
        raise InvalidJob("metric", f"{card.name} was served without a tokenizer", "token ids")
    ids = tokenizer.encode(token, special=False)
    if len(ids) != 1:
        raise InvalidJob("metric", f"{token!r} is {len(ids)} tokens, {tokenizer.tokens(ids)}", "text of one token")
    return ids[0]
