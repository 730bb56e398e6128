"""Head ablation: what each attention head does for a behaviour, by taking it away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lenspool import hooks as hk
from lenspool.errors import InvalidJob
from lenspool.interventions import ArrayRef, Intervention, mean_ablate, zero
from lenspool.job import tokenize
from lenspool.readouts import reduce
from lenspool.recipes.heat_map import HeatMap
from lenspool.recipes.metrics import Metric, as_metric
from lenspool.recipes.patching import head_count
from lenspool.recipes.runs import CONCURRENCY, Planned, measured

if TYPE_CHECKING:
    from lenspool.client import Client, Prompt


@dataclass(frozen=True, eq=False, repr=False)
class HeadAblation(HeatMap):
    """What ablating each head does to a metric.

    Attributes
    ----------
    values
        `[layer, head]`: metric of the ablated run minus that of the plain one, mean over prompts.
    raw
        `[prompt, layer, head]`: metric of each ablated run.
    plain
        `[prompt]`: metric of the runs without ablation.
    """

    raw: np.ndarray
    plain: np.ndarray

    quantity = "ablated - plain"

    def _facts(self) -> str:
        return f"plain {self.plain.mean():.4g}"


async def head_ablation(
    client: Client,
    prompts: Prompt | Iterable[Prompt],
    metric: Metric | Any | Sequence[Metric | Any],
    layers: int | Iterable[int] | None = None,
    *,
    how: Literal["zero", "mean"] = "zero",
    positions: Any = "all",
    concurrency: int = CONCURRENCY,
    progress: bool | None = None,
) -> HeadAblation:
    """Ablate each head at `attn.hook_z`, one at a time, and measure.

    Parameters
    ----------
    prompts
        A list of them, or one text.
    metric
        As in `patching_sweep` (`kl` is then to the plain run); or a list, one for each prompt.
    layers
        Default all.
    how
        `"zero"`, or `"mean"`: the head's mean over all positions of all the prompts.
    positions
        Where to ablate, in each prompt.
    concurrency, progress
        As in `patching_sweep`.

    Raises
    ------
    InvalidJob
        An argument is wrong.
    """
    card, desk = await client._connect()
    tokenizer = desk.tokenizer
    listed: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    texts = [tokenize(card, tokenizer, prompt) for prompt in listed]
    metrics = list(metric) if isinstance(metric, (list, tuple)) else [metric] * len(texts)
    if not texts or len(metrics) != len(texts):
        raise InvalidJob("metric", f"got {len(metrics)} for {len(texts)} prompts", "one, or one for each prompt")
    if how not in ("zero", "mean"):
        raise InvalidJob("how", f"got {how!r}", '"zero" or "mean"')
    wanted = "*" if layers is None else [layers] if isinstance(layers, int) else list(layers)
    names = hk.resolve([f"blocks.{layer}.attn.hook_z" for layer in wanted], card, "layers")
    heads = head_count(card, names, "layers")
    chosen = [as_metric(m) for m in metrics]
    measures = [await m.prepare(client, tokens) for m, tokens in zip(chosen, texts, strict=True)]

    means = await _means(client, texts, names) if how == "mean" else {}
    edits: list[Intervention] = []
    for name in names:
        for head in range(heads):
            if how == "mean":
                edits.append(mean_ablate(name, means[name], heads=head, positions=positions))
            else:
                edits.append(zero(name, heads=head, positions=positions))
    planned = [
        Planned(measure, tokens, edit)
        for measure, tokens in zip(measures, texts, strict=True)
        for edit in [[], *([e] for e in edits)]
    ]
    title = f"ablating {len(edits)} heads"
    values, computed = await measured(client, planned, concurrency=concurrency, progress=progress, title=title)
    table = values.reshape(len(texts), 1 + len(edits))
    plain, raw = table[:, 0], table[:, 1:].reshape(len(texts), len(names), heads)
    axes = {"layer": [name.split(".")[1] for name in names], "head": [str(head) for head in range(heads)]}
    label = ", ".join(dict.fromkeys(m.name for m in chosen))
    effect = (raw - plain[:, None, None]).mean(axis=0)
    return HeadAblation(effect, axes, label, len(planned), computed, raw=raw, plain=plain)


async def _means(client: Client, texts: Sequence[list[int]], names: Sequence[str]) -> dict[str, ArrayRef]:
    """Hook -> mean row over all positions of all prompts, left in the pool."""
    totals: dict[str, Any] = dict.fromkeys(names, 0.0)
    async for run in client.map(texts, [reduce(name, "mean") for name in names]):
        for name in names:
            totals[name] = totals[name] + run[reduce(name, "mean")].astype(np.float64) * len(run.token_ids)
    rows = sum(map(len, texts))
    return {name: await client.put(total / rows) for name, total in totals.items()}
