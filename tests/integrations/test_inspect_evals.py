"""inspect's evals on a real pool, and what is read from their logs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog, read_eval_log
from inspect_ai.model import (
    Model,
)
from inspect_ai.scorer import includes
from inspect_ai.solver import Solver, generate, user_message

from lenspool import CacheError, Client, add
from lenspool.integrations import wire
from lenspool.integrations.inspect import fetch, load
from tests.e2e.conftest import counters, relative
from tests.integrations.inspect_models import HOOK, Reference, model_of

os.environ.setdefault("INSPECT_DISPLAY", "none")
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Russia": "Moscow",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Kenya": "Nairobi",
    "Turkey": "Ankara",
    "Hungary": "Budapest",
    "Belgium": "Brussels",
    "Finland": "Helsinki",
}


def task(name: str, solver: list[Solver] | Solver | None = None, count: int = len(CAPITALS)) -> Task:
    pairs = list(CAPITALS.items())[:count]
    dataset = [Sample(f"What is the capital of {country}?", target=city) for country, city in pairs]
    return Task(dataset, solver=solver or generate(), scorer=includes(), name=name)


async def run(task: Task, model: Model, folder: Path, **config: Any) -> EvalLog:
    options = {"temperature": 0.0, "max_tokens": 10, "max_connections": 64, **config}
    async with asyncio.timeout(300):
        (log,) = await eval_async(task, model=model, log_dir=str(folder), **options)
    assert log.status == "success", log.error
    read = read_eval_log(log.location)  # as anyone who has the file
    assert read.samples is not None and len(read.samples) == len(task.dataset)
    return read


def accuracy(log: EvalLog) -> float:
    assert log.results is not None
    return log.results.scores[0].metrics["accuracy"].value


async def test_an_eval_is_one_batch_and_its_log_holds_references(
    client: Client, tmp_path: Path, vector: np.ndarray
) -> None:
    before = await counters(client)
    plain = await run(task("plain"), model_of(client), tmp_path)
    after = await counters(client)
    written = sum(usage.output_tokens for usage in plain.stats.model_usage.values())
    assert accuracy(plain) > 0.5
    assert after["steps"] - before["steps"] < written / 3, "samples run together"

    hooks = ["blocks.1?.hook_resid_post", "z.3"]
    captured = await run(task("captured"), model_of(client, capture=hooks), tmp_path)
    assert accuracy(captured) == accuracy(plain)
    assert plain.samples is not None and captured.samples is not None
    answers = [[sample.output.completion for sample in log.samples or ()] for log in (plain, captured)]
    assert answers[0] == answers[1]
    size = sum(rows.nbytes for sample in captured.samples for g in load(sample) for rows in g.numpy().values())
    grown = Path(captured.location).stat().st_size - Path(plain.location).stat().st_size
    assert size > 15e6 and grown < 1500 * len(captured.samples), f"{size} bytes of activations, {grown} of log"

    sample = captured.samples[5]
    (turn,) = load(sample)
    straight = await client.capture(turn.prompt_token_ids, ["resid_post.12", "z.3"])
    assert turn.text == sample.output.completion and len(turn.hooks) == 11
    assert relative(turn["resid_post.12"], straight["resid_post.12"]) < 1e-5
    assert turn["z.3"].shape == straight["z.3"].shape
    (fetched,) = await fetch(sample, client)
    assert np.array_equal(fetched["resid_post.12"], turn["resid_post.12"]) and fetched.tokens is not None
    with pytest.raises(CacheError, match="no store"):
        load(sample, store=tmp_path)

    edit = {"12:resid_post": {"op": "add", "value": wire.array_ref(await client.put(vector))}}
    steered = await run(task("steered", count=12), model_of(client, interventions=edit, capture=HOOK), tmp_path)
    assert steered.samples is not None and accuracy(steered) < accuracy(plain)
    (turn,) = load(steered.samples[0])
    same = await client.capture(turn.prompt_token_ids, HOOK, interventions=add(HOOK, vector))
    assert relative(turn[HOOK], same[HOOK]) < 1e-5, "as edited"


async def test_transformer_lens_reads_what_it_captures_in_an_eval(
    client: Client, tmp_path: Path, reference: Reference
) -> None:
    from inspect_ai.analysis import SampleSummary, samples_df
    from transformer_lens.model_bridge.sources.inspect.eval import (
        activations_column,
        capture_activations,
        turn_activations,
    )

    names = [HOOK, "blocks.3.attn.hook_q"]
    artifacts = tmp_path / "artifacts"
    capture = capture_activations(names, output_dir=str(artifacts))
    steps: list[Solver] = [capture, generate(), user_message("Sure?"), generate()]
    model = model_of(client, capture=names, inline=True)
    log = await run(task("turns", steps, count=2), model, tmp_path, max_tokens=4)
    assert log.samples is not None
    for i, sample in enumerate(log.samples):
        saved = np.load(artifacts / f"{sample.id}_epoch1.npz")
        country = list(CAPITALS)[i]
        ids = reference.chat(("user", f"What is the capital of {country}?"))
        assert relative(saved[HOOK], reference.run(ids)[1][12]) < 1e-5 and saved[names[1]].shape == (len(ids), 9, 64)
        turns = turn_activations(sample)
        assert len(turns) == 3, "the solver's run and two turns"
        assert relative(turns[1][HOOK][0], saved[HOOK]) < 1e-5
        usages = [event.output.usage for event in sample.events if event.event == "model"]
        for turn, usage in zip(turns, usages, strict=True):
            assert usage is not None and turn[HOOK].shape == (1, usage.input_tokens, 576)
            assert turn[names[1]].shape == (1, usage.input_tokens, 9, 64)
    table = samples_df(log.location, columns=[*SampleSummary, activations_column()])
    assert len(table) == 2 and HOOK in str(table["tl_activations"].iloc[0])
