"""Prompt and generated positions are told apart: by edits, and by captures."""

from __future__ import annotations

from typing import Any

import numpy as np

from lenspool_cache import Store
from tests.engine.asking import Asker, Prompts, relative

HOOK, LATE = "blocks.12.hook_resid_mid", "blocks.20.hook_resid_post"
LENGTH, GENERATED = 40, 16


def assignment(store: Store, start: int, stop: int | None) -> tuple[np.ndarray, list[dict[str, Any]]]:
    vector = np.random.default_rng(9).normal(0, 10, 576).astype(np.float32)
    value = {"array": store.put_array(vector)}
    return vector, [{"hook": HOOK, "op": "set", "value": value, "ranges": [[start, stop]]}]


async def test_an_edit_of_the_prompt_does_not_touch_generated_tokens(
    engine: Asker, store: Store, prompts: Prompts
) -> None:
    (prompt,) = prompts([LENGTH])
    vector, edits = assignment(store, 0, 1)
    _, rows = await engine.generate(prompt, GENERATED, [HOOK], edits=edits)
    is_vector = (rows[HOOK] == vector).all(axis=1)
    assert is_vector.tolist() == [True] + [False] * (LENGTH + GENERATED - 2)


async def test_an_edit_of_generated_tokens_reaches_every_one(engine: Asker, store: Store, prompts: Prompts) -> None:
    (prompt,) = prompts([LENGTH])
    vector, edits = assignment(store, LENGTH, None)
    plain = await engine.capture(prompt, [HOOK, LATE])
    _, rows = await engine.generate(prompt, GENERATED, [HOOK, LATE], edits=edits)
    is_vector = (rows[HOOK] == vector).all(axis=1)
    assert is_vector.tolist() == [False] * LENGTH + [True] * (GENERATED - 1)
    for name, expected in plain.items():
        assert relative(rows[name][:LENGTH], expected) <= 1e-6


async def test_rows_of_a_prompt_do_not_change_because_of_a_generation(engine: Asker, prompts: Prompts) -> None:
    (prompt,) = prompts([LENGTH])
    plain = await engine.capture(prompt, engine.hooks)
    _, rows = await engine.generate(prompt, GENERATED, engine.hooks)
    for name, expected in plain.items():
        got = rows[name][:LENGTH]
        if name.endswith(("attn_scores", "pattern")):  # of all keys of the run
            length = LENGTH + GENERATED - 1
            got = got.reshape(LENGTH, -1, length)[..., :LENGTH].reshape(LENGTH, -1)
        seen = expected > -1e30
        assert relative(np.where(seen, got, 0), np.where(seen, expected, 0)) <= 1e-6, name
