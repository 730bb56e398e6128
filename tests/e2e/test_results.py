"""Results, prompts and plans on the real pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lenspool.sync
from lenspool import Client, InvalidJob, add, at, stack, zero
from lenspool.readouts import lens, loss
from tests.e2e.conftest import counters

PROMPT = "Paris is large, and the mayor of Paris likes naïve 🙂 tourists"
HOOK = "resid_post.7"


async def test_positions_by_text(client: Client) -> None:
    tokens = await client.tokens(PROMPT)
    second = tokens.at("Paris", 1)
    assert "".join((tokens.strings or [])[p] for p in second).strip() == "Paris"
    result = await client.capture(PROMPT, HOOK, positions=[at("Paris", 1), -1])
    assert result.positions.tolist() == [*second, len(tokens) - 1]
    by_ids = await client.capture(tokens.ids, HOOK, positions=[at("Paris", 1), -1])
    assert by_ids.cached and by_ids[HOOK].tobytes() == result[HOOK].tobytes()
    edited = await client.capture(PROMPT, HOOK, interventions=zero(HOOK, positions=at("🙂")))
    assert np.flatnonzero(~edited[HOOK].any(1)).tolist() == tokens.at("🙂")
    chat = [{"role": "user", "content": "Where is Paris?"}]
    (place,) = (await client.tokens(chat)).at(" Paris")
    assert (await client.capture(chat, HOOK, positions=at(" Paris"))).positions.tolist() == [place]
    generated = await client.generate(PROMPT, max_tokens=3, hooks=HOOK, positions=at("Paris"))
    assert generated.positions.tolist() == tokens.at("Paris")
    other = PROMPT.replace("Paris likes", "London likes")
    assert len(await client.tokens(other)) == len(tokens)
    recipe = lenspool.recipes.patching_sweep
    sweep = await recipe(client, PROMPT, other, "resid_pre.3", at("Paris", 1), metric=lenspool.recipes.prob(" a"))
    assert len(sweep.axes["position"]) == len(second)
    with pytest.raises(InvalidJob, match="not in the prompt"):
        await client.capture(PROMPT, HOOK, positions=at("London"))
    with pytest.raises(InvalidJob, match=r"Client\.map"):
        await client.capture([PROMPT, PROMPT], HOOK)  # type: ignore[list-item]


async def test_a_plan_says_what_will_run(client: Client) -> None:
    prompts: list[Any] = [f"A plan for prompt {i}" for i in range(6)]
    sizes = [len(await client.tokens(p)) for p in prompts]
    await client.capture(prompts[0], [HOOK, "logits"])
    await client.capture(prompts[1], HOOK)
    before = (await counters(client))["steps"]
    plan = await client.plan([*prompts, prompts[5]], [HOOK, "logits"])
    assert (plan.prompts, plan.hits, plan.repeats, plan.misses) == (7, 1, 1, 5)
    assert plan.tokens == sum(sizes[1:])
    assert plan.bytes == 4 * (49152 * sum(sizes[1:]) + 576 * sum(sizes[2:]))
    assert (await counters(client))["steps"] == before
    found = [pair async for pair in client.as_completed(prompts, [HOOK, "logits"], concurrency=3, progress=True)]
    assert sorted(index for index, _ in found) == list(range(6))
    assert all("".join(result.tokens) == prompts[index] for index, result in found)
    after = await client.plan(prompts, [HOOK, "logits"])
    assert (after.hits, after.misses, after.tokens, after.bytes) == (6, 0, 0, 0)
    (worker,) = (await client.status())[0]["workers"]
    ahead = await client.plan(["Never asked for, and so to be run"], HOOK)
    assert worker["busy_tokens_per_s"] > 0 and ahead.seconds is not None and ", about " in repr(ahead)
    assert 0 < ahead.seconds < 60 and after.seconds == 0 and "about" not in repr(after)
    async with Client(client.url, store=False) as far:
        blind = await far.plan(prompts, [HOOK, "logits"])
    assert blind.hits is None and blind.tokens == sum(sizes) and "does not reach the store" in repr(blind)


async def test_results_in_their_forms(client: Client) -> None:
    hooks: list[Any] = ["resid_post.*", "pattern.3", lens("resid_post.*", k=2), loss()]
    result = await client.capture(PROMPT, hooks)
    data = pytest.importorskip("xarray", reason="an extra") and result.to_xarray()
    words = "".join(data.text.values)
    assert words.startswith("Paris is large") and np.isnan(data["unembed.hook_out|loss()"].values[-1])
    assert np.allclose(data["blocks.3.attn.hook_pattern"].sum("key"), 1, atol=1e-5)
    pytest.importorskip("matplotlib", reason="an extra").use("Agg")
    ax = result.plot.logit_lens()
    best = result[lens("resid_post.29", k=2)].indices[:, 0]
    desk = (await client._connect())[1]
    assert desk.tokenizer is not None
    assert ax.texts[0].get_text() == repr(desk.tokenizer.text([int(best[0])]))[1:-1][:12].replace("$", r"\$")
    vector = np.ones(576)
    edited = await client.capture(PROMPT, "resid_post.*", interventions=add("resid_post.9", vector, positions=[5]))
    difference = result.compare(edited)
    moved = {(h, int(p)) for h, row in zip(difference.hooks, difference.relative, strict=True)
             for p in difference.positions[row > 1e-4]}  # fmt: skip
    assert {int(h.split(".")[1]) for h, _ in moved} == set(range(9, 30)) and min(p for _, p in moved) == 5
    others = [r async for r in client.map(["One", "One two three"], "resid_post.*")]
    stacked = stack([edited, *others])
    assert stacked.mask.sum(1).tolist() == [len(result.token_ids), *(len(o.token_ids) for o in others)]


def test_the_sync_twin_has_the_same(client: Client, store: Path) -> None:
    with lenspool.sync.Client(client.url, store=store) as twin:
        assert twin.tokens(PROMPT).at("Paris")
        assert twin.plan([PROMPT], "embed").prompts == 1
        assert [index for index, _ in twin.as_completed([PROMPT], "embed")] == [0]
