"""Interventions that need an answer of the pool first: rows to swap, and norms to be relative to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lenspool import hooks as hk
from lenspool import positions as ps
from lenspool.errors import InvalidJob
from lenspool.interventions import Intervention, listed
from lenspool.job import Reuse, tokenize
from lenspool.readouts import norm

if TYPE_CHECKING:
    from lenspool.card import ModelCard
    from lenspool.client.many import Many

SAMPLE = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at a hundred degrees Celsius at sea level.",
    "She opened the door, looked around, and decided to leave.",
    "def add(a, b):\n    return a + b\n",
    "In 1969, two astronauts walked on the Moon for the first time.",
    "I would like a cup of tea, please, with a little milk.",
    "The results of the experiment were not what we expected.",
    "Once upon a time there was a king who had three daughters.",
)
"""Prompts whose rows say how long rows are, where the caller has none: English, code, dates."""


def sample_prompts(card: ModelCard) -> list[Any]:
    """`SAMPLE`, or token ids for a model without a tokenizer."""
    if card.tokenizer is not None:
        return list(SAMPLE)
    return [[(7 * i + 13 * k) % card.vocab_size for i in range(16)] for k in range(len(SAMPLE))]


async def mean_norms(client: Many, hooks: Sequence[str], prompts: Iterable[Any] | None) -> dict[str, float]:
    """Hook -> mean L2 norm of its rows over all positions but the first of some prompts.

    The first position is left out: in many models it is an attention sink, with norms a hundred times the others'.
    """
    chosen = sample_prompts(await client.card()) if prompts is None else prompts
    totals, count = dict.fromkeys(hooks, 0.0), 0
    async for result in client.map(chosen, [norm(hook) for hook in hooks]):
        count += len(result.positions) - 1
        for hook in hooks:
            totals[hook] += float(result[norm(hook)][1:].sum())
    if not count:
        raise InvalidJob("prompts", "no prompt has more than one token", "at least one prompt of two tokens")
    return {hook: total / count for hook, total in totals.items()}


async def resolved(
    client: Many,
    prompt: Any,
    interventions: Intervention | Iterable[Intervention] | None,
    reuse: Reuse = "prefix",
) -> tuple[list[Intervention], Mapping[str, float]]:
    """Interventions without `swap_rows`, and the norms of hooks that some of them are relative to."""
    items = listed(interventions)
    card, desk = await client._connect()
    norms: dict[str, float] = {}
    relative = [item for item in items if isinstance(item, Intervention) and item.options.get("relative") is not None]
    if relative:
        norms = await client.norms(sorted({name for item in relative for name in hk.resolve(item.hook, card)}))
    if not any(isinstance(item, Intervention) and item.op == "swap_rows" for item in items):
        return items, norms
    tokens = tokenize(card, desk.tokenizer, prompt)
    pairs = []
    for i, item in enumerate(items):
        if not isinstance(item, Intervention):
            raise InvalidJob(f"interventions[{i}]", f"got {type(item).__name__}", "lenspool.add, scale, ...")
        for name in hk.resolve(item.hook, card, f"interventions[{i}].hook"):
            pairs.append((name, i, item))
    # what comes before a swap in the network, or at the same hook in the list, has been done by then
    pairs.sort(key=lambda pair: (hk.network_order(pair[0], card.n_layers), pair[1]))
    done: list[Intervention] = []
    for name, i, item in pairs:
        if item.op != "swap_rows":
            done.append(Intervention(item.op, name, item.value, item.options, item.where))
            continue
        swapped = [
            ps.ordered(item.options[side], len(tokens), generating=False, field=f"interventions[{i}].{side}")
            for side in ("i", "j")
        ]
        if any(side is None or len(side) != 1 for side in swapped) or "positions" in item.where:
            raise InvalidJob(f"interventions[{i}]", "swap_rows takes two positions, i and j", "two ints")
        first, second = (side[0] for side in swapped if side)
        if first == second:
            continue
        rows = await client.capture(tokens, name, positions=sorted({first, second}), interventions=done, reuse=reuse)
        options = {"source_positions": [second, first]}
        done.append(Intervention("patch", name, rows, options, {**item.where, "positions": [first, second]}))
    return done, norms
