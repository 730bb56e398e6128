"""vLLM's prefix cache stays on: captures miss no rows for it, and edited KV is nobody else's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lenspool.errors import EngineFailed
from lenspool_cache import Store
from lenspool_worker.scheduling import edit_key
from tests.engine.asking import Asker, Prompts, relative, worst
from tests.engine.oracle import Oracle

HOOK, LATE = "blocks.6.hook_resid_post", ["blocks.29.hook_resid_post", "unembed.hook_out"]
LENGTH = 300
BLOCK = 128
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def vector() -> np.ndarray:
    return np.random.default_rng(5).normal(0, 30, 576).astype(np.float32)


@pytest.fixture(scope="module")
def steering(store: Store, vector: np.ndarray) -> list[dict[str, Any]]:
    value = {"array": store.put_array(vector)}
    return [{"hook": HOOK, "op": "add", "value": value, "coefficient": 1.0, "ranges": [[0, None]]}]


async def computed(engine: Asker) -> int:
    return int((await engine.settled())["tokens"])


async def test_a_plain_prompt_after_a_steered_one(
    engine: Asker, oracle: Oracle, prompts: Prompts, steering: list[dict[str, Any]]
) -> None:
    """The last position reads the cache, so it would see KV that the steered run has left there."""
    (prompt,) = prompts([LENGTH])
    last = [(LENGTH - 1, LENGTH)]
    steered, _ = await engine.generate(prompt, 8, edits=steering)
    after_steered = await engine.capture(prompt, LATE, ranges=last)
    plain, _ = await engine.generate(prompt, 8)
    assert await engine.engine._llm.reset_prefix_cache()
    cold = await engine.capture(prompt, LATE, ranges=last)
    assert all(np.array_equal(after_steered[name], cold[name]) for name in LATE)
    expected = oracle.run([*prompt, *plain.token_ids[:-1]])
    assert all(relative(cold[name], expected[name][LENGTH - 1 : LENGTH]) <= TOLERANCE for name in LATE)
    assert expected["unembed.hook_out"].argmax(axis=1)[LENGTH - 1 :].tolist() == plain.token_ids
    assert steered.token_ids != plain.token_ids


async def test_a_steered_prompt_after_a_plain_one(
    engine: Asker, oracle: Oracle, prompts: Prompts, vector: np.ndarray, steering: list[dict[str, Any]]
) -> None:
    """Rows are asked for from the last position on, so that nothing but keys keeps it from the plain run's KV."""
    (prompt,) = prompts([LENGTH])
    await engine.generate(prompt, 8)
    hooks, ranges = [HOOK, *LATE], [(LENGTH - 1, None)]
    steered, rows = await engine.generate(prompt, 8, hooks, ranges=ranges, edits=steering)
    edit = torch.from_numpy(vector)
    expected = oracle.run([*prompt, *steered.token_ids[:-1]], [(HOOK, lambda x: x + edit, [(0, None)])])
    assert worst(rows, {name: expected[name][LENGTH - 1 :] for name in hooks})[0] <= TOLERANCE
    assert expected["unembed.hook_out"].argmax(axis=1)[LENGTH - 1 :].tolist() == steered.token_ids


async def test_equal_edits_share_and_unequal_ones_do_not(
    engine: Asker, prompts: Prompts, steering: list[dict[str, Any]]
) -> None:
    """What is computed again tells whose KV was read."""
    (prompt,) = prompts([LENGTH])
    last = [(LENGTH - 1, LENGTH)]
    same = [{**steering[0], "ranges": [[0, LENGTH]]}]
    other = [{**same[0], "coefficient": -1.0}]

    async def tokens(edits: list[dict[str, Any]]) -> tuple[int, dict[str, np.ndarray]]:
        before = await computed(engine)
        rows = await engine.capture(prompt, LATE, ranges=last, edits=edits)
        return await computed(engine) - before, rows

    first, one = await tokens(same)
    again, two = await tokens(same)
    unlike, _ = await tokens(other)
    plain, _ = await tokens([])
    assert first == unlike == plain == LENGTH
    assert again < LENGTH - 64, "equal edits read one another's cache"
    assert worst(one, two)[0] <= TOLERANCE


async def test_an_edit_shares_what_comes_before_it(
    engine: Asker, store: Store, oracle: Oracle, prompts: Prompts, vector: np.ndarray
) -> None:
    """Patches at different places of one prompt compute only what lies behind; each row of a value is its own."""
    (prompt,) = prompts([LENGTH])
    last, places = [(LENGTH - 1, LENGTH)], (140, 200, 270)
    await engine.capture(prompt, LATE, ranges=last)
    rows = {"array": store.put_array(np.stack([vector, -vector]))}
    for place in places:
        for chosen, sign in ((0, 1), (1, -1)):
            edit = {"hook": HOOK, "op": "set", "value": {**rows, "rows": [[chosen, chosen + 1]]}}
            before = await computed(engine)
            got = await engine.capture(prompt, LATE, ranges=last, edits=[{**edit, "ranges": [[place, place + 1]]}])
            assert await computed(engine) - before <= LENGTH - place + BLOCK, "all in front of the edit was read"
            changed = torch.from_numpy(sign * vector)
            expected = oracle.run(prompt, [(HOOK, lambda x, v=changed: 0 * x + v, [(place, place + 1)])])
            assert worst(got, {name: expected[name][-1:] for name in LATE})[0] <= TOLERANCE
    await engine.capture(prompt, LATE, ranges=last)
    expected = oracle.run(prompt)
    plain = await engine.capture(prompt, LATE, ranges=last)
    assert worst(plain, {name: expected[name][-1:] for name in LATE})[0] <= TOLERANCE


async def test_a_failed_edit_leaves_nothing_to_be_read(
    engine: Asker, store: Store, oracle: Oracle, prompts: Prompts
) -> None:
    """An edit whose array the engine cannot read when it begins: the same edit again is computed anew, and right."""
    (prompt,) = prompts([LENGTH])
    last = [(LENGTH - 1, LENGTH)]
    vector = np.random.default_rng(9).normal(0, 30, 576).astype(np.float32)
    digest = store.put_array(vector)
    edit = {"hook": HOOK, "op": "add", "value": {"array": digest}, "coefficient": 1.0, "ranges": [[3, 9]]}
    engine.engine._checks.shape_of(digest)  # the parent has seen it
    (file,) = [path for path in (store.path / "arrays").rglob("*.h5") if path.stem.startswith(digest[:16])]
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(EngineFailed, match="KeyError"):
        await engine.capture(prompt, LATE, ranges=last, edits=[edit])
    file.write_bytes(content)
    rows = await engine.capture(prompt, LATE, ranges=last, edits=[edit])
    tensor = torch.from_numpy(vector)
    expected = oracle.run(prompt, [(HOOK, lambda x: x + tensor, [(3, 9)])])
    assert worst(rows, {name: expected[name][-1:] for name in LATE})[0] <= TOLERANCE


def test_the_key_of_a_block_is_what_is_done_to_it() -> None:
    """Equal where nothing differs, though more is done elsewhere; different in op, place, row of a value, and order."""
    edit = {"hook": HOOK, "op": "set", "value": {"array": "0" * 64, "rows": [[0, 8]]}, "ranges": [[2, 6], [40, 44]]}
    other = {"hook": HOOK, "op": "zero", "ranges": [[3, None]]}
    keys = [
        edit_key([edit], 0, 16),
        edit_key([{**edit, "ranges": [[3, 7], [40, 44]]}], 0, 16),
        edit_key([{**edit, "op": "add", "coefficient": 1.0}], 0, 16),
        edit_key([edit], 32, 48),
        edit_key([{**edit, "ranges": [[1, 2], [2, 5], [40, 44]]}], 32, 48),
        edit_key([edit, other], 0, 16),
        edit_key([other, edit], 0, 16),
    ]
    assert len(set(keys) - {None}) == len(keys) - 1 and keys[3] == keys[4]
    assert edit_key([edit], 16, 32) is None and edit_key([], 0, 16) is None
    assert edit_key([edit, {**other, "ranges": [[60, None]]}], 0, 16) == keys[0]
    assert edit_key([other], 16, 32) == edit_key([{**other, "ranges": [[16, 90]]}], 16, 32)


async def test_cached_positions_still_have_rows(engine: Asker, oracle: Oracle, prompts: Prompts) -> None:
    """P + A, then P + B over the same blocks: as many rows as tokens, equal to a run without a cache."""
    (shared,) = prompts([256])
    first, second = ([*shared, *end] for end in prompts([20, 30]))
    await engine.capture(first, LATE)
    before = await computed(engine)
    await engine.capture(second, LATE, ranges=[(len(second) - 1, len(second))])
    assert await computed(engine) - before < len(second) - 64, "the cache was read where no rows are wanted from it"
    rows = await engine.capture(second, LATE)
    assert all(len(r) == len(second) for r in rows.values())
    assert worst(rows, oracle.run(second))[0] <= TOLERANCE
    for start in (BLOCK - 1, BLOCK, 2 * BLOCK + 9):
        before = await computed(engine)
        rows = await engine.capture(second, LATE, ranges=[(start, start + 3), (len(second) - 1, len(second))])
        read = start // BLOCK * BLOCK
        assert await computed(engine) - before == len(second) - read, "the cache is read up to the first wanted row"
        expected = oracle.run(second)
        assert worst(rows, {n: expected[n][[*range(start, start + 3), -1]] for n in LATE})[0] <= TOLERANCE
    result, rows = await engine.generate(second, 4, LATE, ranges=[(len(second) - 1, None)])
    expected = oracle.run([*second, *result.token_ids[:-1]])
    assert worst(rows, {name: expected[name][len(second) - 1 :] for name in LATE})[0] <= TOLERANCE
