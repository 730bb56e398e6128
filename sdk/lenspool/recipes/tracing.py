"""Causal tracing: where a fact is looked up, by hiding its subject and restoring single activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lenspool import hooks as hk
from lenspool import positions as ps
from lenspool.errors import InvalidJob
from lenspool.interventions import add, as_number, patch
from lenspool.job import tokenize
from lenspool.places import located
from lenspool.recipes.heat_map import HeatMap, position_labels
from lenspool.recipes.metrics import Token, prob
from lenspool.recipes.runs import CONCURRENCY, Planned, measured
from lenspool.staged import sample_prompts

if TYPE_CHECKING:
    from lenspool.client import Client, Prompt
    from lenspool.tokenizer import Tokenizer

EMBED = "hook_embed"


@dataclass(frozen=True, eq=False, repr=False)
class CausalTrace(HeatMap):
    """How much of the target's probability each restored activation brings back.

    Attributes
    ----------
    values
        `[hook, position]`: probability with the activation restored minus that of the corrupted run, mean over the
        samples of noise (the paper's indirect effect).
    raw
        `[sample, hook, position]`: probability with the activation restored.
    clean
        Probability in the plain run.
    corrupt
        `[sample]`: probability with noise on the subject and nothing restored.
    subject
        Positions of the subject, which are marked `*`.
    noise
        Standard deviation of the noise.
    """

    raw: np.ndarray
    clean: float
    corrupt: np.ndarray
    subject: list[int]
    noise: float

    quantity = "restored - corrupt"

    def _facts(self) -> str:
        return f"clean {self.clean:.3g}, corrupt {self.corrupt.mean():.3g}, noise {self.noise:.3g}"


async def causal_trace(
    client: Client,
    prompt: Prompt,
    subject: Any,
    target: Token,
    hooks: str | Iterable[str] = "blocks.*.hook_resid_post",
    positions: Any = "all",
    *,
    window: int = 1,
    samples: int = 10,
    noise: float | None = None,
    seed: int = 0,
    concurrency: int = CONCURRENCY,
    progress: bool | None = None,
) -> CausalTrace:
    """Causal tracing of Meng et al. 2022, "Locating and Editing Factual Associations in GPT".

    Gaussian noise is added to the embeddings of the subject, the same at every cell of a sample; then the clean rows of
    one hook at one position are restored, and the target's probability is measured.

    Parameters
    ----------
    subject
        Text that stands in a text prompt (its first place), or positions.
    target
        The token whose probability is measured, by id or as text.
    hooks
        Where to restore, e.g. `"blocks.*.hook_mlp_out"`, `"blocks.*.hook_attn_out"`.
    positions
        Where to restore.
    window
        How many neighbours in `hooks` are restored together, centred; the paper takes 1 for the stream and 10 for MLP
        and attention.
    samples
        How many times noise is drawn.
    noise
        Standard deviation of the noise; default three times that of the numbers of the embeddings of a few sentences.
    seed
        Of the noise: equal calls draw the same, and are served from the store.
    concurrency, progress
        As in `patching_sweep`.

    Raises
    ------
    InvalidJob
        An argument is wrong.
    """
    card, desk = await client._connect()
    tokenizer = desk.tokenizer
    tokens = tokenize(card, tokenizer, prompt)
    hidden = _subject(tokenizer, prompt, subject, len(tokens))
    positions, _ = located(positions, (), tokens, tokenizer)
    where = ps.ordered(positions, len(tokens), generating=False) or []
    names = hk.resolve(hooks, card)
    for field, number in (("window", window), ("samples", samples)):
        if type(number) is not int or number < 1:
            raise InvalidJob(field, f"got {number!r}", "an int from 1")
    measure = await prob(target).prepare(client, tokens)
    deviation = 3 * await _embedding_std(client) if noise is None else as_number(noise, "noise")

    width = card.hooks[EMBED].width
    drawn = np.random.default_rng(seed).standard_normal((samples, len(hidden), width)) * deviation
    hide = [add(EMBED, await client.put(values), positions=hidden) for values in drawn]
    source = await client.capture(tokens, names)
    refs = {name: await client.put(source[name]) for name in names}
    planned = [Planned(measure, tokens)]
    for edit in hide:
        planned.append(Planned(measure, tokens, [edit]))
        for i in range(len(names)):
            # as in the paper's code: an even window has one more before its centre than after it
            together = names[max(0, i - window // 2) : i + (window + 1) // 2]
            for p in where:
                restored = [patch(name, refs[name], positions=p, source_positions=p) for name in together]
                planned.append(Planned(measure, tokens, [edit, *restored]))
    title = f"tracing {len(names)} hooks"
    values, computed = await measured(client, planned, concurrency=concurrency, progress=progress, title=title)
    table = values[1:].reshape(samples, 1 + len(names) * len(where))
    corrupt, raw = table[:, 0], table[:, 1:].reshape(samples, len(names), len(where))
    labels = position_labels(source.tokens, where)
    labels = [f"{label}*" if p in hidden else label for label, p in zip(labels, where, strict=True)]
    return CausalTrace(
        (raw - corrupt[:, None, None]).mean(axis=0),
        {"hook": names, "position": labels},
        prob(target).name,
        len(planned),
        computed,
        raw=raw,
        clean=float(values[0]),
        corrupt=corrupt,
        subject=hidden,
        noise=deviation,
    )


def _subject(tokenizer: Tokenizer | None, prompt: Any, subject: Any, count: int) -> list[int]:
    """Positions of the subject: of every token that has one of its characters."""
    if not isinstance(subject, str):
        return sorted(set(ps.ordered(subject, count, generating=False, field="subject") or []))
    if not isinstance(prompt, str) or tokenizer is None:
        raise InvalidJob("subject", "is text, and the prompt is not", "positions, or a text prompt")
    start = prompt.find(subject)
    if start < 0 or not subject:
        raise InvalidJob("subject", f"{subject!r} does not stand in the prompt", "a part of it, or positions")
    spans = tokenizer.spans(prompt)
    return [p for p, (first, last) in enumerate(spans) if first < start + len(subject) and last > start]


async def _embedding_std(client: Client) -> float:
    """Standard deviation of all numbers of the embeddings of the sample prompts."""
    runs = [run[EMBED].astype(np.float64) async for run in client.map(sample_prompts(await client.card()), EMBED)]
    return float(np.concatenate(runs).std())
