"""Generation: the oracle's tokens, activations of generated positions, edits in prefill and decode, exact repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lenspool import Client, InvalidJob, add, zero
from tests.e2e.conftest import counters, relative

PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), transformers.AutoTokenizer.from_pretrained(smollm2)


async def test_greedy_tokens_text_and_rows_equal_the_oracle(client: Client, oracle: Any) -> None:
    result = await client.generate(PROMPT, max_tokens=12, hooks=["resid_post.7", "resid_post.28"])
    model, tokenizer = oracle
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    assert result.prompt_token_ids == ids[0].tolist()
    assert result.prompt_token_ids + result.token_ids == expected
    assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.finish_reason == "length"
    assert result.positions.tolist() == list(range(len(expected) - 1)), "the last token was never fed back"
    with torch.no_grad():
        states = model(torch.tensor([expected[:-1]]), output_hidden_states=True).hidden_states
    for layer in (7, 28):
        assert relative(result[f"resid_post.{layer}"], states[layer + 1][0].numpy()) <= 1e-5


async def test_repeat_runs_nothing_and_further_hooks_belong_to_the_same_tokens(client: Client) -> None:
    first = await client.generate("The repeated story begins", max_tokens=8, hooks="resid_post.3")
    before = await counters(client)
    again = await client.generate("The repeated story begins", max_tokens=8, hooks="resid_post.3")
    assert again.cached and again.token_ids == first.token_ids and again.text == first.text
    assert again["resid_post.3"].tobytes() == first["resid_post.3"].tobytes()
    assert (await counters(client))["steps"] == before["steps"]
    more = await client.generate("The repeated story begins", max_tokens=8, hooks=["resid_post.3", "mlp_out.3"])
    assert more.token_ids == first.token_ids
    assert more["resid_post.3"].tobytes() == first["resid_post.3"].tobytes()
    assert more["mlp_out.3"].shape == more["resid_post.3"].shape
    whole = await client.capture([*first.prompt_token_ids, *first.token_ids[:-1]], ["mlp_out.3"])
    assert relative(more["mlp_out.3"], whole["mlp_out.3"]) <= 1e-5


async def test_generated_positions_and_phases(client: Client) -> None:
    hook = "resid_post.10"
    plain = await client.generate(PROMPT, max_tokens=6, hooks=hook, positions="generated", ignore_eos=True)
    n = len(plain.prompt_token_ids)
    assert plain.positions.tolist() == list(range(n, n + 5))
    prompt_only = await client.generate(
        PROMPT, max_tokens=6, hooks=hook, ignore_eos=True, interventions=add(hook, 3.0, positions=0)
    )
    everything = await client.generate(
        PROMPT, max_tokens=6, hooks=hook, ignore_eos=True, interventions=zero(hook, phase="generated")
    )
    assert everything[hook][:n].any(axis=1).all(), "the prompt is untouched"
    assert not everything[hook][n:].any(), "every generated row is edited"
    reference = await client.capture(PROMPT, hook)
    assert relative(prompt_only[hook][1:n], reference[hook][1:]) <= 1e-5, "only position 0 was edited"
    single = await client.generate(PROMPT, max_tokens=1, hooks=hook, positions="generated")
    assert single[hook].shape == (0, 576) and len(single.positions) == 0


async def test_an_edit_changes_the_continuation_and_leaves_no_trace(client: Client) -> None:
    prompt = "The capital of France is the city of Paris. The capital of Germany is the city of"
    cold = await client.generate(prompt, max_tokens=6)
    edited = await client.generate(prompt, max_tokens=6, interventions=zero("blocks.*.hook_attn_out"))
    assert edited.token_ids != cold.token_ids
    longer = await client.generate(prompt, max_tokens=7)
    assert longer.token_ids[:6] == cold.token_ids


async def test_stop_strings_and_seeds(client: Client) -> None:
    free = await client.generate(PROMPT, max_tokens=20)
    assert free.text is not None
    word = free.text.split()[2]
    stopped = await client.generate(PROMPT, max_tokens=20, stop=word)
    assert stopped.finish_reason == "stop" and word not in (stopped.text or "")
    assert free.text.startswith(stopped.text or "?")
    one, two = [await client.generate(PROMPT, max_tokens=8, temperature=1.0, seed=s) for s in (1, 2)]
    same = await client.generate(PROMPT, max_tokens=8, temperature=1.0, seed=1)
    assert one.token_ids != two.token_ids and same.token_ids == one.token_ids and same.cached
    first = await client.generate(PROMPT, max_tokens=8, temperature=1.0)
    second = await client.generate(PROMPT, max_tokens=8, temperature=1.0)
    assert not first.cached and not second.cached


async def test_bad_sampling_is_refused(client: Client) -> None:
    with pytest.raises(InvalidJob, match="max_tokens"):
        await client.generate(PROMPT, max_tokens=0)
    with pytest.raises(InvalidJob, match="1024"):
        await client.generate(PROMPT, max_tokens=2000)


async def test_rows_of_a_generation_are_those_of_the_run(client: Client) -> None:
    result = await client.generate("Numbers: 1, 2, 3,", max_tokens=10, hooks="logits", ignore_eos=True)
    n = len(result.prompt_token_ids)
    predicted = np.argmax(result["logits"], axis=-1)
    assert predicted[n - 1 :].tolist() == result.token_ids, "row p predicts token p+1"
