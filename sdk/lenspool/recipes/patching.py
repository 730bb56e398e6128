"""Activation patching: which activation of a clean run, put into a corrupt run, brings the clean behaviour back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lenspool import hooks as hk
from lenspool import positions as ps
from lenspool.errors import InvalidJob
from lenspool.interventions import patch
from lenspool.job import tokenize
from lenspool.places import located
from lenspool.recipes.heat_map import HeatMap, position_labels
from lenspool.recipes.metrics import Metric, as_metric
from lenspool.recipes.runs import CONCURRENCY, Planned, measured

if TYPE_CHECKING:
    from lenspool.card import ModelCard
    from lenspool.client import Client, Prompt


@dataclass(frozen=True, eq=False, repr=False)
class PatchingSweep(HeatMap):
    """How much of the clean behaviour each patch brings back.

    Attributes
    ----------
    values
        `[hook, position]`, or `[hook, head]`: `(raw - corrupt) / (clean - corrupt)`, 0 is the corrupt run and 1 the
        clean one. NaN where both are the same.
    raw
        The metric of each patched run.
    clean, corrupt
        The metric of the two runs without patches.
    """

    raw: np.ndarray
    clean: float
    corrupt: float

    quantity = "recovered: 0 corrupt, 1 clean"

    def _facts(self) -> str:
        return f"clean {self.clean:.4g}, corrupt {self.corrupt:.4g}"


async def patching_sweep(
    client: Client,
    clean: Prompt,
    corrupt: Prompt,
    hooks: str | Iterable[str] | None = None,
    positions: Any = "all",
    *,
    metric: Metric | Any,
    heads: bool = False,
    concurrency: int = CONCURRENCY,
    progress: bool | None = None,
) -> PatchingSweep:
    """Patch each (hook, position) of a clean run into a corrupt one, one at a time, and measure.

    Of Meng et al. 2022 ("Locating and Editing Factual Associations in GPT") and Wang et al. 2022 ("Interpretability in
    the Wild"); denoising, in the words of Heimersheim and Nanda 2024.

    Parameters
    ----------
    clean, corrupt
        Prompts of as many tokens.
    hooks
        Names, aliases, short forms or globs; default `"blocks.*.hook_resid_pre"`, or `"blocks.*.attn.hook_z"` with
        `heads`.
    positions
        Which, as everywhere; `at` looks in the clean prompt.
    metric
        `logit_diff(a, b)`, `prob(token)`, `kl`, or a callable: logits `[d_vocab]` of the last position -> number.
    heads
        Patch head by head, each at all the positions together.
    concurrency, progress
        Runs in the pool at a time; whether to show a bar (None: on a terminal and in a notebook).

    Raises
    ------
    InvalidJob
        An argument is wrong, or the prompts differ in length.
    """
    card, desk = await client._connect()
    tokenizer = desk.tokenizer
    tokens, corrupted = (tokenize(card, tokenizer, prompt) for prompt in (clean, corrupt))
    if len(tokens) != len(corrupted):
        counts = f"has {len(corrupted)} tokens, and clean {len(tokens)}"
        raise InvalidJob("corrupt", counts, "prompts of as many tokens, so that each position has its counterpart")
    default = "blocks.*.attn.hook_z" if heads else "blocks.*.hook_resid_pre"
    names = hk.resolve(default if hooks is None else hooks, card)
    positions, _ = located(positions, (), tokens, tokenizer)
    where = ps.ordered(positions, len(tokens), generating=False) or []
    count = head_count(card, names, "hooks") if heads else 0
    chosen = as_metric(metric)
    measure = await chosen.prepare(client, tokens)

    source = await client.capture(tokens, names)
    refs = {name: await client.put(source[name]) for name in names}
    if heads:
        edits = [
            patch(name, refs[name], positions=where, source_positions=where, heads=head)
            for name in names
            for head in range(count)
        ]
        second = {"head": [str(head) for head in range(count)]}
    else:
        edits = [patch(name, refs[name], positions=p, source_positions=p) for name in names for p in where]
        second = {"position": _labels(source.tokens, tokenizer, corrupted, where)}
    patched = [Planned(measure, corrupted, [edit]) for edit in edits]
    planned = [Planned(measure, tokens), Planned(measure, corrupted), *patched]
    title = f"patching {len(names)} hooks"
    values, computed = await measured(client, planned, concurrency=concurrency, progress=progress, title=title)
    best, worst = float(values[0]), float(values[1])
    raw = values[2:].reshape(len(names), -1)
    recovered = (raw - worst) / (best - worst) if best != worst else np.full_like(raw, np.nan)
    return PatchingSweep(
        recovered, {"hook": names, **second}, chosen.name, len(planned), computed, raw=raw, clean=best, corrupt=worst
    )


def _labels(clean: list[str] | None, tokenizer: Any, corrupt: list[int], where: list[int]) -> list[str]:
    """Labels of positions, with both tokens where the prompts differ."""
    labels = position_labels(clean, where)
    if clean is None:
        return labels
    other = tokenizer.tokens(corrupt)
    return [
        label if clean[p] == other[p] else f"{label} / {other[p]!r}" for label, p in zip(labels, where, strict=True)
    ]


def head_count(card: ModelCard, names: Sequence[str], field: str) -> int:
    """Number of heads of hooks that all have as many.

    Raises
    ------
    InvalidJob
        A hook has no heads, or they have different numbers of them.
    """
    allowed = "attn.hook_q, hook_k, hook_v or hook_z, of layers with as many heads"
    if not names:
        raise InvalidJob(field, "is empty", allowed)
    for name in names:
        if len(card.hooks[name].dims) != 2 or 0 in card.hooks[name].dims:
            raise InvalidJob(field, f"{name} has no heads", allowed)
    counts = {card.hooks[name].dims[0] for name in names}
    if len(counts) > 1:
        raise InvalidJob(field, f"they have {sorted(counts)} heads", allowed)
    return counts.pop()
