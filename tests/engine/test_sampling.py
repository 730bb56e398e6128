"""Sampling on the real engine: log-probabilities against transformers, seeds, biases, penalties and ends."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lenspool.access import parse_generation
from lenspool.errors import InvalidJob
from lenspool.job import GENERATION
from lenspool.logprobs import Logprobs
from lenspool_cache import Store
from lenspool_worker.generation import Follower
from tests.engine.asking import Asker, Prompts, relative
from tests.engine.oracle import Oracle

TOLERANCE = 2e-4
"""Of a log-probability: logits are near 20, and agree to about 1e-5 of that."""
LOGITS = "unembed.hook_out"
HOOK = "blocks.12.hook_resid_post"


async def asked(engine: Asker, tokens: list[int], count: int, hooks: Any = (), **options: Any) -> dict[str, Any]:
    """What the store has of a generation, log-probabilities as arrays."""
    request = engine.request(tokens, hooks, generate=count, **options)
    await engine.engine.run(request)
    segments = engine.store.lookup(request.run, [GENERATION])[GENERATION]
    made = parse_generation(engine.store.read(segments[0]))
    return {n: Logprobs.from_document(v) if n.endswith("logprobs") else v for n, v in made.items()}


def check_logprobs(got: Logprobs, logits: np.ndarray, tokens: list[int], k: int) -> None:
    """Against the oracle's logits `[n, vocabulary]` from which the tokens are predicted."""
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    assert got.token_ids.tolist() == tokens and got.top_token_ids.shape == (len(tokens), k)
    chosen = expected[np.arange(len(tokens)), tokens]
    assert np.abs(got.logprobs - chosen).max() <= TOLERANCE
    ranks = (expected > chosen[:, None]).sum(axis=1) + 1
    others = (np.abs(expected - chosen[:, None]) <= TOLERANCE).sum(axis=1) - 1  # which may stand on the other side
    assert (np.abs(got.ranks - ranks) <= others).all()
    best = -np.sort(-expected, axis=1)[:, :k]
    assert np.abs(got.top_logprobs - best).max(initial=0) <= TOLERANCE
    assert np.abs(np.take_along_axis(expected, got.top_token_ids, 1) - got.top_logprobs).max(initial=0) <= TOLERANCE


async def check_prompt(engine: Asker, oracle: Oracle, prompt: list[int], **options: Any) -> None:
    made = await asked(engine, prompt, 6, logprobs=5, prompt_logprobs=3, **options)
    whole = [*prompt, *made["token_ids"]]
    logits = oracle.run(whole[:-1])[LOGITS]
    n = len(prompt)
    check_logprobs(made["prompt_logprobs"], logits[: n - 1], prompt[1:], 3)
    check_logprobs(made["logprobs"], logits[n - 1 :], made["token_ids"], 5)
    assert (made["logprobs"].ranks == 1).all(), "greedy"


async def test_log_probabilities_are_those_of_transformers(engine: Asker, oracle: Oracle, prompts: Prompts) -> None:
    """Also where the prompt's KV is there already, and of a prompt of one token."""
    (prompt,) = prompts([200])
    await engine.generate(prompt, 2)
    await check_prompt(engine, oracle, prompt)
    await check_prompt(engine, oracle, prompt, hooks=[HOOK])
    single = await asked(engine, prompt[:1], 2, logprobs=0, prompt_logprobs=2)
    assert len(single["prompt_logprobs"]) == 0 and single["logprobs"].top_token_ids.shape == (2, 0)
    check_logprobs(single["logprobs"], oracle.run([prompt[0], single["token_ids"][0]])[LOGITS], single["token_ids"], 0)


async def test_log_probabilities_of_a_crowd(engine: Asker, oracle: Oracle, prompts: Prompts) -> None:
    """Each its own k beside others that want none; raw ones, whatever temperature and penalties do."""
    wanted = prompts(list(range(3, 19)))
    chosen = {"temperature": 1.5, "repetition_penalty": 1.3, "logit_bias": [[7, 5.0]]}

    async def one(i: int, prompt: list[int]) -> dict[str, Any]:
        told = {"logprobs": i % 4, "prompt_logprobs": 3} if i % 3 else {}
        return await asked(engine, prompt, 5 + i % 4, seed=i, **chosen, **told)

    made = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(wanted)))
    for i, (prompt, got) in enumerate(zip(wanted, made, strict=True)):
        assert ("logprobs" in got) == ("prompt_logprobs" in got) == (i % 3 > 0)
        if i % 3:
            logits = oracle.run([*prompt, *got["token_ids"][:-1]])[LOGITS]
            check_logprobs(got["prompt_logprobs"], logits[: len(prompt) - 1], prompt[1:], 3)
            check_logprobs(got["logprobs"], logits[len(prompt) - 1 :], got["token_ids"], i % 4)


async def test_log_probabilities_show_edits(engine: Asker, oracle: Oracle, prompts: Prompts, store: Store) -> None:
    (prompt,) = prompts([40])
    vector = np.random.default_rng(8).normal(0, 20, 576).astype(np.float32)
    edit = {"hook": HOOK, "op": "add", "value": {"array": store.put_array(vector)}, "coefficient": 1.0}
    made = await asked(engine, prompt, 4, edits=[{**edit, "ranges": [[10, None]]}], logprobs=2, prompt_logprobs=2)
    whole = [*prompt, *made["token_ids"][:-1]]
    logits = oracle.run(whole, [(HOOK, lambda x: x + torch.from_numpy(vector), [(10, None)])])[LOGITS]
    check_logprobs(made["prompt_logprobs"], logits[:39], prompt[1:], 2)
    check_logprobs(made["logprobs"], logits[39:], made["token_ids"], 2)


async def test_a_seed_gives_the_same_tokens_in_another_batch(engine: Asker, prompts: Prompts) -> None:
    wanted = prompts(list(range(5, 21)))
    chosen = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}

    async def one(i: int) -> list[int]:
        return list((await asked(engine, wanted[i], 12, seed=i % 5, **chosen))["token_ids"])

    alone = [await one(i) for i in range(len(wanted))]
    crowd = await asyncio.gather(*(one(i) for i in reversed(range(len(wanted)))))
    assert list(reversed(crowd)) == alone
    other = await asked(engine, wanted[0], 12, seed=1, **chosen)
    assert other["token_ids"] != alone[0]


def test_engines_draw_samples_of_their_own(tiny_llama: Path) -> None:
    """Else the workers of a pool would draw the same ones, where a request has no seed."""
    from lenspool_worker.settings import engine_arguments

    assert engine_arguments(tiny_llama, {}).seed != engine_arguments(tiny_llama, {}).seed
    assert engine_arguments(tiny_llama, {"seed": 3}).seed == 3


async def test_arguments_do_what_their_names_say(engine: Asker, oracle: Oracle, prompts: Prompts) -> None:
    (prompt,) = prompts([12])
    plain = (await asked(engine, prompt, 12))["token_ids"]
    logits = oracle.run(prompt)[LOGITS][-1]
    order = np.argsort(-logits)

    async def first(**sampling: Any) -> int:
        return int((await asked(engine, prompt, 1, **sampling))["token_ids"][0])

    assert await first() == order[0]
    margin = float(logits[order[0]] - logits[order[1]])
    assert await first(logit_bias=[[int(order[1]), margin + 0.5]]) == order[1]
    assert await first(logit_bias=[[int(order[0]), -100.0]]) == order[1]
    probabilities = np.exp(logits - logits.max())
    narrow = float(probabilities[order[1]]) * 1.01  # keeps the likeliest alone
    drawn = [await first(temperature=1.0, min_p=narrow, seed=s) for s in range(12)]
    assert set(drawn) == {order[0]}
    assert len({await first(temperature=1.0, seed=s) for s in range(12)}) > 1

    stop = plain[4]
    at = plain.index(stop)
    ended = await asked(engine, prompt, 12, stop_token_ids=[stop])
    assert ended["token_ids"] == plain[: at + 1] and ended["finish_reason"] == "stop"
    later = await asked(engine, prompt, 12, stop_token_ids=[stop], min_tokens=8)
    assert len(later["token_ids"]) >= 8 and stop not in later["token_ids"][:8]
    assert later["token_ids"][:at] == plain[:at]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_penalties_are_those_of_their_definition(
    engine: Asker, oracle: Oracle, prompts: Prompts, name: str
) -> None:
    """Greedy tokens are the argmax of the oracle's logits, penalized by hand."""
    mattered = 0
    asking = [(prompt, asked(engine, prompt, 40, **{name: 1.9})) for prompt in prompts([10, 12, 14, 16])]
    answers = await asyncio.gather(*(answer for _, answer in asking))
    for (prompt, _), answer in zip(asking, answers, strict=True):
        tokens = answer["token_ids"]
        logits = oracle.run([*prompt, *tokens[:-1]])[LOGITS][len(prompt) - 1 :]
        for j, (row, token) in enumerate(zip(logits, tokens, strict=True)):
            counts = np.bincount(tokens[:j], minlength=len(row))
            seen = np.bincount([*prompt, *tokens[:j]], minlength=len(row)) > 0
            penalized = {
                "frequency_penalty": row - 1.9 * counts,
                "presence_penalty": row - 1.9 * (counts > 0),
                "repetition_penalty": np.where(seen, np.where(row > 0, row / 1.9, row * 1.9), row),
            }[name]
            assert penalized[token] >= penalized.max() - 1e-3
            mattered += int(row.argmax()) != token
    assert mattered


async def test_a_follower_hears_every_token_and_no_part_of_a_stop_string(engine: Asker, prompts: Prompts) -> None:
    (prompt,) = prompts([30])
    varied = {"repetition_penalty": 1.3}
    plain = await asked(engine, prompt, 60, **varied)
    text: str = plain["text"]
    stops = [text[at : at + 9] for at in range(len(text) // 2, len(text)) if text.find(text[at : at + 9]) == at]
    stop = next(s for s in stops if len(s.split()) > 1)  # longer than a token, and not there before
    for early in (True, False):
        told: list[tuple[list[int], str]] = []

        def tell(tokens: Any, words: str, told: list[tuple[list[int], str]] = told) -> None:
            told.append((list(tokens), words))

        follower = Follower(tell, wanted=early)
        request = engine.request(prompt, [HOOK], generate=60, stop=[stop], **varied)
        running = asyncio.create_task(engine.engine.run(request, follower))
        if not early:
            await asyncio.sleep(0.3)
            assert not told and not running.done()
            follower.begin()
        result = await running
        assert result.finish_reason == "stop" and result.text == text[: text.index(stop)]
        assert result.token_ids == plain["token_ids"][: len(result.token_ids)]
        assert len(told) > (10 if early else 2)
        if early:
            assert len(told[0][0]) == 1
        for (tokens, words), (more, longer) in itertools.pairwise(told):
            assert more[: len(tokens)] == tokens and longer.startswith(words)
        assert all(result.text.startswith(words) for _, words in told)
        assert all(result.token_ids[: len(tokens)] == tokens for tokens, _ in told)
        rows = engine.rows(request, len(prompt) + len(result.token_ids) - 1)[HOOK]
        assert len(rows) == len(prompt) + len(result.token_ids) - 1


async def test_row_p_predicts_token_p_plus_1(engine: Asker, oracle: Oracle, prompts: Prompts) -> None:
    """Greedy tokens are the argmax of the row in front of them, the first that of the prompt's last row."""
    (prompt,) = prompts([17])
    result, rows = await engine.generate(prompt, 10, [LOGITS])
    whole = [*prompt, *result.token_ids]
    assert len(rows[LOGITS]) == len(whole) - 1
    assert rows[LOGITS].argmax(axis=1)[len(prompt) - 1 :].tolist() == result.token_ids
    assert relative(rows[LOGITS], oracle.run(whole[:-1])[LOGITS]) <= 1e-5


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}


async def test_text_is_json_of_a_schema(engine: Asker, oracle: Oracle, prompts: Prompts) -> None:
    """Beside others that want none; logits are the model's own, log-probabilities those among the tokens that fit."""
    told = [1, 504, 3575, 282, 4649, 314]  # one after which the model does not go on with white space
    (free,) = prompts([14])
    alone = await asked(engine, free, 20)
    options = {"json_schema": SCHEMA, "logprobs": 0, "ignore_eos": False}
    request = engine.request(told, [LOGITS], generate=40, **options)
    _, beside = await asyncio.gather(engine.engine.run(request), asked(engine, free, 20, [HOOK]))
    segments = engine.store.lookup(request.run, [GENERATION])[GENERATION]
    made = parse_generation(engine.store.read(segments[0]))
    found = json.loads(made["text"])
    assert set(found) == {"city", "large"} and found["city"] in ("Paris", "Rome") and found["large"] in (True, False)
    assert made["finish_reason"] == "stop" and beside["token_ids"] == alone["token_ids"]
    whole = [*told, *made["token_ids"]]
    expected = oracle.run(whole[:-1])[LOGITS]
    assert relative(engine.rows(request, len(whole) - 1)[LOGITS], expected) <= 1e-5
    logprobs = Logprobs.from_document(made["logprobs"])
    assert (logprobs.ranks == 1).all(), "greedy, among those that fit"
    alike = torch.log_softmax(torch.from_numpy(expected[len(told) - 1 :]).double(), dim=-1).numpy()
    gained = logprobs.logprobs - alike[np.arange(len(alike)), made["token_ids"]]
    assert gained.min() >= -TOLERANCE and gained.max() > 0.1, "others are ruled out"
    with pytest.raises(InvalidJob, match="json_schema"):
        await asked(engine, told, 5, json_schema={"type": "no such type"})
