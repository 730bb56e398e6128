"""Edits against transformers with the same edit made by a module hook, all in one mixed batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lenspool_cache import Store
from lenspool_cache.ranges import OpenRange
from tests.engine.asking import Asker, Prompts, Rows, worst
from tests.engine.edit_cases import OPS, Case, Cases, check, closed
from tests.engine.oracle import Oracle

GENERATED = 5
TOLERANCE = 1e-5
WIDTHS = {"hook_embed": 576, "ln_final.hook_out": 576, "blocks.10.mlp.hook_post": 1536}
WIDTHS |= {f"blocks.10.hook_{at}": 576 for at in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")}
WIDTHS |= {f"blocks.10.attn.hook_{at}": 576 for at in ("q", "z")}
DOWNSTREAM = ["blocks.10.hook_resid_post", "blocks.20.hook_resid_mid", "ln_final.hook_out", "unembed.hook_out"]


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Oracle:
    return Oracle(smollm2, torch.float64, inner=True)


def size_at(hook: str) -> float:
    return 0.1 if hook == "hook_embed" else 1.0 if ".attn." in hook or ".mlp." in hook else 10.0


async def test_every_op_at_every_hook(engine: Asker, store: Store, exact: Oracle, prompts: Prompts) -> None:
    """Prompt positions, generated ones, or both; with plain requests between them.

    Each op comes to each kind of hook. Ten layers on, the rows still are the oracle's within the tolerance. Beyond,
    edits as strong as these make the model amplify rounding: noise of 1e-6 at the edit becomes 1e-5 at the logits in
    float64. The first position is this model's attention sink, and amplifies at once, so for edits there the rows at
    the edit itself are compared.
    """
    made = Cases(store, 0)
    cases: list[tuple[list[int], list[Case]]] = []
    hooks = list(WIDTHS)
    for k, (op, turn) in enumerate((op, turn) for op in OPS for turn in range(4)):
        hook = hooks[(3 * turn + OPS.index(op)) % len(hooks)]
        (prompt,) = prompts([9 + k * 7 % 31])
        n = len(prompt)
        ranges: list[OpenRange] = [[(2, 4), (n - 1, n)], [(n, None)], [(1, None)], [(0, 1)]][turn]  # type: ignore[assignment]
        case = made.make(op, hook, WIDTHS[hook], size_at(hook), closed(op, ranges, n))
        cases.append((prompt, [case]))
        if k % 3 == 0:
            cases.append((prompt, []))

    async def one(prompt: list[int], both: list[Case]) -> tuple[list[int], Rows]:
        edits = [document for document, _ in both]
        sink = any(edit["ranges"][0][0] == 0 for edit in edits)
        hooks = {*(() if sink and edits else DOWNSTREAM[: 2 if edits else None]), *(edit["hook"] for edit in edits)}
        result, rows = await engine.generate(prompt, GENERATED, sorted(hooks), edits=edits)
        return result.token_ids, rows

    answers = await asyncio.gather(*(one(*case) for case in cases))
    errors = []
    for (prompt, both), (tokens, rows) in zip(cases, answers, strict=True):
        errors.append(check(prompt, tokens, rows, [edit for _, edit in both], exact))
    print("\nedits: worst relative error", max(errors), "of", len(errors))


async def test_edits_at_one_hook_apply_in_order(engine: Asker, store: Store, exact: Oracle, prompts: Prompts) -> None:
    (prompt,) = prompts([17])
    hook, made = "blocks.10.hook_resid_mid", Cases(store, 1)
    add, scale = (made.make(op, hook, 576, 10.0, [(1, None)]) for op in ("add", "scale"))
    late = made.make("zero", "blocks.15.hook_mlp_out", 576, 10.0, [(0, None)])
    seen = []
    for both in ([add, scale, late], [late, scale, add]):
        result, rows = await engine.generate(prompt, GENERATED, [hook, *DOWNSTREAM], edits=[d for d, _ in both])
        check(prompt, result.token_ids, rows, [e for _, e in both], exact)
        seen.append(rows[hook])
    assert np.abs(seen[0] - seen[1])[1:].max() > 1.0, "the order matters here"


async def test_nothing_of_nan_and_infinity_is_left(engine: Asker, prompts: Prompts) -> None:
    """A stream made infinite, then NaN, then assigned: rows at the hook are clean, and so is all that follows."""
    (prompt,) = prompts([12])
    hook = "blocks.10.hook_resid_mid"
    ranges = [[2, 5]]
    huge = [{"hook": hook, "op": "scale", "factor": 3e38, "ranges": ranges}] * 2
    bad = [*huge, {"hook": hook, "op": "scale", "factor": 0.0, "ranges": ranges}]
    broken = await engine.capture(prompt, [hook], edits=bad)
    assert np.isnan(broken[hook][2:5]).all() and np.isfinite(broken[hook][:2]).all()
    for clean in ({"op": "zero"}, {"op": "set", "value": 0.5}):
        last = {"hook": hook, "ranges": ranges, **clean}
        rows = await engine.capture(prompt, [hook, *DOWNSTREAM], edits=[*bad, last])
        assert np.array_equal(rows[hook][2:5], np.full((3, 576), clean.get("value", 0.0), np.float32))
        alone = await engine.capture(prompt, [hook, *DOWNSTREAM], edits=[last])
        assert worst(rows, alone)[0] <= TOLERANCE


GOLDEN = [1, 504, 3575, 282, 4649, 314]
"""Token ids of TransformerLens's own acceptance numbers for SmolLM2-135M-Instruct."""


async def test_an_edit_bound_to_tokens(engine: Asker, exact: Oracle) -> None:
    """In the prompt and in what is generated, wherever the token stands, and nowhere else."""
    hook = "blocks.10.hook_attn_out"
    edit: dict[str, Any] = {"hook": hook, "op": "scale", "factor": -3.0, "ranges": [[0, None]], "tokens": [GOLDEN[3]]}
    first, _ = await engine.generate(GOLDEN, 1, edits=[edit])
    bound = [GOLDEN[3], *first.token_ids]
    assert first.token_ids[0] not in GOLDEN
    edit["tokens"] = sorted(bound)
    result, rows = await engine.generate(GOLDEN, 12, [hook, *DOWNSTREAM[:2]], edits=[edit])
    tokens = [*GOLDEN, *result.token_ids[:-1]]
    places = [p for p, token in enumerate(tokens) if token in bound]
    assert places[:2] == [3, 6], "in the prompt, and in what was generated"
    check(GOLDEN, result.token_ids, rows, [(hook, lambda x: -3.0 * x, [(p, p + 1) for p in places])], exact)


@pytest.mark.parametrize(
    ("hook", "edit", "expected"),
    [
        ("blocks.5.hook_resid_post", {"op": "scale", "factor": 2.0}, 26.1843),
        ("blocks.5.hook_attn_out", {"op": "scale", "factor": 2.0}, 4.6345),
        ("blocks.5.hook_mlp_out", {"op": "scale", "factor": 2.0}, 5.0992),
        ("hook_embed", {"op": "scale", "factor": 2.0}, 11.6024),
        ("ln_final.hook_out", {"op": "scale", "factor": 2.0}, 30.9092),
        ("blocks.5.hook_resid_post", {"op": "set", "value": 1.5, "ranges": [[1, 2], [3, 4]]}, 41.7740),
    ],
)
async def test_the_golden_numbers(
    engine: Asker, exact: Oracle, hook: str, edit: dict[str, Any], expected: float
) -> None:
    """The largest change of a logit, as `run_with_hooks` of TransformerLens gives it; undone without trace.

    Its numbers are of the original weights. Ours come from an 8-bit copy, so they are near; the oracle's are the same.
    """
    logits = "unembed.hook_out"
    document = {"hook": hook, "ranges": [[0, 6]], **edit}
    plain = await engine.capture(GOLDEN, [logits])
    edited = await engine.capture(GOLDEN, [logits], edits=[document])
    change = np.abs(edited[logits] - plain[logits]).max()
    assert change == pytest.approx(expected, rel=0.015)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * edit["factor"] if edit["op"] == "scale" else torch.full_like(x, edit["value"])

    ranges = [(start, stop) for start, stop in document["ranges"]]
    truth = exact.run(GOLDEN, [(hook, function, ranges)])[logits] - exact.run(GOLDEN)[logits]
    assert change == pytest.approx(np.abs(truth).max(), abs=1e-3)
    again = await engine.capture(GOLDEN, [logits])
    assert np.array_equal(again[logits], plain[logits])


async def test_add_moves_the_captured_value_by_the_vector(engine: Asker, store: Store, prompts: Prompts) -> None:
    (prompt,) = prompts([12])
    for hook, width in WIDTHS.items():
        document, (_, function, _) = Cases(store, 2).make("add", hook, width, size_at(hook), [(3, 9)])
        plain = (await engine.capture(prompt, [hook]))[hook]
        moved = (await engine.capture(prompt, [hook], edits=[document]))[hook]
        difference = function(torch.zeros(1, width)).numpy()
        assert np.abs(moved[3:9] - plain[3:9] - difference).max() <= 1e-6 * max(1.0, np.abs(plain[3:9]).max())
        assert np.array_equal(moved[:3], plain[:3])


async def test_nobody_feels_the_neighbours(engine: Asker, store: Store, prompts: Prompts) -> None:
    """48 requests in one step, a third plain, two edited: the bits are the same whatever the others do."""
    hooks = ["blocks.9.hook_resid_post", "blocks.10.hook_mlp_out", *DOWNSTREAM[1:]]
    groups = [prompts([9 + (7 * i + k) % 13 for i in range(16)]) for k in range(3)]
    (plug,) = prompts([900])
    made = Cases(store, 3)
    first = [made.make(op, "blocks.10.hook_resid_mid", 576, 10.0, [(0, 7)])[0] for op in ("preserve", "project_out")]
    second = [made.make("add", "blocks.10.attn.hook_z", 576, 1.0, [(2, 9)])[0]]
    second.append(made.make("rows", "blocks.10.hook_mlp_out", 576, 10.0, [(1, 6)])[0])

    async def batch(*edits: list[dict[str, Any]]) -> list[list[Rows]]:
        """All in one step: they arrive while the engine is busy with one long prompt."""
        for _ in range(5):
            requests = [[engine.request(p, hooks, edits=e) for p in g] for g, e in zip(groups, edits, strict=True)]
            before = await engine.settled()
            busy = asyncio.create_task(engine.engine.run(engine.request(plug, ["blocks.0.hook_resid_pre"])))
            await asyncio.sleep(0.1)
            mixed = [r for three in zip(*requests, strict=True) for r in three]
            await asyncio.gather(busy, *(engine.engine.run(r) for r in mixed))
            if (await engine.settled())["steps"] - before["steps"] == 2:
                return [[engine.rows(r) for r in group] for group in requests]
        raise AssertionError("the batch was never run in one step")

    def same(one: list[Rows], other: list[Rows]) -> bool:
        return all(np.array_equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in hooks)

    all_three = await batch([], first, second)
    only_first, only_second, none = await batch([], first, []), await batch([], [], second), await batch([], [], [])
    assert all(np.isfinite(rows[name]).all() for rows in all_three[0] for name in hooks)
    assert same(all_three[0], none[0]) and same(all_three[0], only_first[0]) and same(all_three[0], only_second[0])
    assert same(all_three[1], only_first[1]) and same(all_three[2], only_second[2])
    assert not same(all_three[1], none[1]) and not same(all_three[2], none[2]), "the edits bite"
