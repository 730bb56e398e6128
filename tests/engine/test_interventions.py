"""Edits against transformers with the same edit made by a module hook, all in one mixed batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lenspool_cache import Store
from lenspool_cache.ranges import OpenRange
from tests.engine.asking import Asker, Prompts, worst
from tests.engine.oracle import Edit, Oracle

GENERATED = 5
TOLERANCE = 1e-5
SITES = ["hook_embed", "ln_final.hook_out"]
SITES += [f"blocks.10.hook_{at}" for at in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")]
DOWNSTREAM = ["blocks.10.hook_resid_post", "blocks.20.hook_resid_mid", "ln_final.hook_out", "unembed.hook_out"]

Rows = dict[str, np.ndarray]
Both = tuple[dict[str, Any], Edit]


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> Oracle:
    return Oracle(smollm2, torch.float64)


def edits_of(op: str, hook: str, ranges: list[OpenRange], store: Store) -> Both:
    """An intervention, and what the oracle does for it."""
    scale = 0.1 if hook == "hook_embed" else 10.0
    vector = np.random.default_rng(len(hook)).normal(0, scale, 576).astype(np.float32)
    tensor, value = torch.from_numpy(vector), {"array": store.put_array(vector)}
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "zero": lambda rows: 0 * rows,
        "scale": lambda rows: rows * -1.75,
        "add": lambda rows: rows + 0.5 * tensor,
        "set": lambda rows: tensor[None].repeat(len(rows), 1),
        "set number": lambda rows: torch.full_like(rows, 0.375),
        "add number": lambda rows: rows - 0.25,
    }
    fields: dict[str, dict[str, Any]] = {
        "zero": {},
        "scale": {"factor": -1.75},
        "add": {"value": value, "coefficient": 0.5},
        "set": {"value": value},
        "set number": {"value": 0.375},
        "add number": {"value": 0.125, "coefficient": -2.0},
    }
    document = {"hook": hook, "op": op.split()[0], "ranges": [list(r) for r in ranges], **fields[op]}
    return document, (hook, functions[op], ranges)


def check(prompt: list[int], tokens: list[int], rows: Rows, edits: list[Edit], exact: Oracle) -> float:
    """Rows and tokens of a generation are what the oracle has in float64; the largest relative error."""
    computed = [*prompt, *tokens[:-1]]
    truth = exact.run(computed, edits)
    logits = truth["unembed.hook_out"][len(prompt) - 1 :]
    # a stream that was set to zero has equal logits, of which any is the greatest
    assert all(line[token] >= line.max() - 1e-4 for line, token in zip(logits, tokens, strict=True))
    error, hook = worst(rows, truth)
    assert error <= TOLERANCE, f"{hook} is off by {error:.1e}"
    return error


async def test_every_op_at_every_hook(engine: Asker, store: Store, exact: Oracle, prompts: Prompts) -> None:
    """Prompt positions, generated ones, or both; with plain requests between them.

    Ten layers on, the rows still are the oracle's within the tolerance. Beyond, edits as strong as these make the model
    amplify rounding: noise of 1e-6 at the edit becomes 1e-5 at the logits in float64. The first position is this
    model's attention sink, and amplifies at once, so for edits there the rows at the edit itself are compared.
    """
    cases: list[tuple[list[int], list[Both]]] = []
    ops = ("zero", "scale", "add", "set", "set number", "add number")
    for k, (op, hook) in enumerate((op, hook) for op in ops for hook in SITES):
        (prompt,) = prompts([9 + k * 7 % 31])
        n = len(prompt)
        ranges: list[OpenRange] = [[(2, 4), (n - 1, n)], [(n, None)], [(1, None)], [(0, 1)]][k % 4]  # type: ignore[assignment]
        cases.append((prompt, [edits_of(op, hook, ranges, store)]))
        if k % 3 == 0:
            cases.append((prompt, []))

    async def one(prompt: list[int], both: list[Both]) -> tuple[list[int], Rows]:
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
    hook = "blocks.10.hook_resid_mid"
    add, scale = (edits_of(op, hook, [(1, None)], store) for op in ("add", "scale"))
    late = edits_of("zero", "blocks.15.hook_mlp_out", [(0, None)], store)
    seen = []
    for both in ([add, scale, late], [late, scale, add]):
        result, rows = await engine.generate(prompt, GENERATED, [hook, *DOWNSTREAM], edits=[d for d, _ in both])
        assert check(prompt, result.token_ids, rows, [e for _, e in both], exact) <= TOLERANCE
        seen.append(rows[hook])
    assert np.abs(seen[0] - seen[1])[1:].max() > 1.0, "the order matters here"


async def test_add_moves_the_captured_value_by_the_vector(engine: Asker, store: Store, prompts: Prompts) -> None:
    (prompt,) = prompts([12])
    for hook in SITES:
        document, (_, function, _) = edits_of("add", hook, [(3, 9)], store)
        plain = (await engine.capture(prompt, [hook]))[hook]
        moved = (await engine.capture(prompt, [hook], edits=[document]))[hook]
        difference = function(torch.zeros(1, 576)).numpy()
        assert np.abs(moved[3:9] - plain[3:9] - difference).max() <= 1e-6 * max(1.0, np.abs(plain[3:9]).max())
        assert np.array_equal(moved[:3], plain[:3])


async def test_plain_rows_do_not_feel_their_neighbours(engine: Asker, store: Store, prompts: Prompts) -> None:
    """The same batch three times: neighbours steered, steered by a zero vector, or plain; the bits are the same."""
    hooks = ["blocks.9.hook_resid_post", "blocks.10.hook_mlp_out", *DOWNSTREAM]
    plain, neighbours = prompts([30 + i for i in range(8)]), prompts([25 + i for i in range(8)])
    (plug,) = prompts([900])
    steer, _ = edits_of("add", "blocks.10.hook_resid_mid", [(0, 20)], store)
    nothing = {**steer, "value": {"array": store.put_array(np.zeros(576, dtype=np.float32))}}

    async def batch(edits: list[dict[str, Any]]) -> list[list[Rows]]:
        """All in one step: they arrive while the engine is busy with one long prompt."""
        for _ in range(5):
            requests = [[engine.request(p, hooks) for p in plain]]
            requests.append([engine.request(p, hooks, edits=edits) for p in neighbours])
            before = await engine.settled()
            first = asyncio.create_task(engine.engine.run(engine.request(plug, ["blocks.0.hook_resid_pre"])))
            await asyncio.sleep(0.1)
            mixed = [r for pair in zip(*requests, strict=True) for r in pair]
            await asyncio.gather(first, *(engine.engine.run(r) for r in mixed))
            if (await engine.settled())["steps"] - before["steps"] == 2:
                return [[engine.rows(r) for r in group] for group in requests]
        raise AssertionError("the batch was never run in one step")

    answers = [await batch(edits) for edits in ([steer], [nothing], [])]
    for name in hooks:
        for i in range(8):
            steered, zero, none = (rows[0][i][name] for rows in answers)
            assert np.isfinite(none).all()
            assert np.array_equal(steered, none) and np.array_equal(zero, none)
        if name != "blocks.9.hook_resid_post":
            assert not np.array_equal(answers[0][1][0][name], answers[2][1][0][name]), "the steering bites"
            assert np.array_equal(answers[1][1][0][name], answers[2][1][0][name])
