"""Readouts through the whole pool, on the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lenspool import Client, InvalidJob
from lenspool.readouts import entropy, lens, loss, project, reduce, top_k
from tests.e2e.conftest import relative

PROMPT = "Water boils at one hundred degrees, and it freezes at"
LAYERS = (3, 17, 29)


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> Any:
    """Token ids, and logits of the model and of some layers' streams, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager")
    ids = transformers.AutoTokenizer.from_pretrained(smollm2)(PROMPT)["input_ids"]
    streams: dict[int, torch.Tensor] = {}
    for i in LAYERS:
        model.model.layers[i].register_forward_hook(
            lambda _module, _args, out, i=i: streams.update({i: out[0] if isinstance(out, tuple) else out})
        )
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        layers = {i: model.lm_head(model.model.norm(stream.reshape(len(ids), -1))) for i, stream in streams.items()}
    return ids, logits, layers


async def test_readouts_equal_the_oracle(client: Client, expected: Any) -> None:
    ids, logits, layers = expected
    asked = [top_k("logits", 10), loss(), entropy(), *(lens(f"resid_post.{i}", k=5) for i in LAYERS)]
    result = await client.capture(PROMPT, asked)
    top = result[asked[0]]
    values, indices = logits.topk(10)
    assert (top.indices == indices.numpy()).all()
    assert relative(top.values, values.numpy()) <= 1e-5
    assert result["logits|top_k(10)"] is top
    per_token = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    assert relative(result[loss()], per_token.numpy()) <= 1e-4
    assert relative(result[entropy()], torch.distributions.Categorical(logits=logits).entropy().numpy()) <= 1e-4
    for i, through in layers.items():
        read = result[lens(f"resid_post.{i}", k=5)]
        values, indices = through.topk(5)
        assert (read.indices == indices.numpy()).all()
        assert relative(read.values, values.numpy()) <= 1e-5
    again = await client.capture(PROMPT, asked)
    assert again.cached and (again[asked[0]].values == top.values).all()


async def test_arrays_and_numbers_ride_through_redis(client: Client) -> None:
    matrix = np.random.default_rng(0).standard_normal((576, 3)).astype(np.float32)
    asked = [project("resid_post.5", matrix), reduce("resid_post.5", "max"), lens("resid_post.5", k=2)]
    async with Client(client.url, store=False) as far:
        result = await far.capture(PROMPT, asked, positions=[1, 2, 5])
        with pytest.raises(InvalidJob, match="does not have the array") as error:
            await far.capture(PROMPT, f'resid_post.5|project("{"0" * 64}",3)')
        assert error.value.field == "project.matrix"
    rows = (await client.capture(PROMPT, "resid_post.5", positions=[1, 2, 5]))["resid_post.5"]
    assert relative(result[asked[0]], rows @ matrix) <= 1e-6
    assert (result[asked[1]] == rows.max(0)).all()
    assert result[asked[2]].indices.shape == (3, 2)
    assert sorted(result.arrays()) == sorted(
        [n for n in result if "lens" not in n]
        + [f"blocks.5.hook_resid_post|lens.top_k(2).{part}" for part in ("indices", "values")]
    )
    with pytest.raises(KeyError):
        result[top_k("logits", 3)]
