"""The main job: a captured prompt is right, the second time nothing runs, and a wrong call costs nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lenspool import (
    CacheCorrupt,
    Client,
    DeadlineExceeded,
    InvalidJob,
    UnknownHook,
    UnknownModel,
    UnsupportedHook,
    add,
    scale,
    set_,
    zero,
)
from tests.e2e.conftest import counters, relative

PROMPT = "The Eiffel Tower is in the city of"
STREAM = "blocks.*.hook_resid_post"


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager")
    return model.eval(), transformers.AutoTokenizer.from_pretrained(smollm2)


@torch.no_grad()
def hidden_states(oracle: Any, ids: list[int]) -> Any:
    return oracle[0](torch.tensor([ids]), output_hidden_states=True)


async def test_capture_equals_the_oracle(client: Client, oracle: Any) -> None:
    result = await client.capture(PROMPT, [STREAM, "embed", "logits"])
    ids = oracle[1](PROMPT)["input_ids"]
    assert result.token_ids == ids
    assert result.tokens == [oracle[1].decode([t]) for t in ids]
    assert result.positions.tolist() == list(range(len(ids)))
    expected = hidden_states(oracle, ids)
    assert relative(result["hook_embed"], expected.hidden_states[0][0].numpy()) <= 1e-5
    for layer in range(29):
        got = result[f"resid_post.{layer}"]
        assert got.dtype == np.float32
        assert relative(got, expected.hidden_states[layer + 1][0].numpy()) <= 1e-5
    assert relative(result["logits"], expected.logits[0].numpy()) <= 1e-5
    assert result["logits"].shape == (len(ids), 49152)
    assert torch.equal(result.torch("embed"), torch.from_numpy(result["embed"].copy()))


async def test_second_call_runs_no_step_and_returns_the_same_bytes(client: Client) -> None:
    prompt = "Second calls are free"
    first = await client.capture(prompt, STREAM)
    assert not first.cached and first.provenance["computed_rows"] == 30 * len(first.token_ids)
    before = await counters(client)
    second = await client.capture(prompt, STREAM)
    narrower = await client.capture(prompt, ["resid_post.3", "resid_post.7"], positions="last")
    after = await counters(client)
    assert second.cached and narrower.cached
    assert second.provenance["computed_rows"] == 0
    assert second.provenance["reused_rows"] == 30 * len(first.token_ids)
    assert after["steps"] == before["steps"] > 0
    for name in first:
        assert first[name].tobytes() == second[name].tobytes()
    assert narrower["resid_post.7"].tobytes() == first["resid_post.7"][-1:].tobytes()


async def test_only_what_is_missing_is_computed(client: Client) -> None:
    prompt = "Only the missing part of it"
    last = await client.capture(prompt, ["resid_post.3"], positions="last")
    n = len(last.token_ids)
    whole = await client.capture(prompt, ["resid_post.3", "mlp_out.2"])
    assert whole.provenance["computed_rows"] == 2 * n - 1
    assert whole.provenance["reused_rows"] == 1
    assert not whole.cached
    assert whole["resid_post.3"][-1:].tobytes() == last["resid_post.3"].tobytes()


async def test_text_chat_and_ids_are_three_inputs(client: Client, oracle: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    chat = await client.capture(messages, "embed")
    expected = oracle[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert chat.token_ids == expected
    ids = await client.capture(np.array(expected), "embed")
    assert ids.token_ids == expected and ids.cached
    verbatim = await client.capture([5, 5, 5], "embed")
    assert verbatim.token_ids == [5, 5, 5]


async def test_interventions_show_in_the_capture(client: Client) -> None:
    prompt, hook = "An edited stream of tokens", "blocks.4.hook_resid_post"
    plain = await client.capture(prompt, [hook, "resid_post.5"])
    vector = np.linspace(-3, 3, 576)
    edited = await client.capture(
        prompt, [hook, "resid_post.5"], interventions=[add(hook, vector, coefficient=2.0, positions=[1, -1])]
    )
    moved = edited[hook] - plain[hook]
    assert relative(moved[1], (2 * vector).astype(np.float32)) <= 1e-4
    assert relative(moved[-1], (2 * vector).astype(np.float32)) <= 1e-4
    assert np.abs(moved[0]).max() <= 1e-4 * np.abs(plain[hook][0]).max()
    assert relative(edited["resid_post.5"][-1], plain["resid_post.5"][-1]) > 1e-3
    zeroed = await client.capture(prompt, hook, interventions=[scale(hook, 5.0), zero(hook, positions=2)])
    assert not zeroed[hook][2].any()
    both = await client.capture(prompt, hook, interventions=[set_(hook, 1.5), scale(hook, 2.0)])
    assert (both[hook] == 3.0).all()


async def test_array_is_sent_once_and_used_by_reference(client: Client) -> None:
    vector = np.random.default_rng(0).normal(size=576)
    ref = await client.put(vector)
    by_ref = await client.capture(PROMPT, "resid_post.9", interventions=add("resid_post.8", ref))
    by_value = await client.capture(PROMPT, "resid_post.9", interventions=add("resid_post.8", vector))
    assert by_value.cached
    assert by_ref["resid_post.9"].tobytes() == by_value["resid_post.9"].tobytes()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"prompt": ""}, InvalidJob),
        ({"prompt": [49152]}, InvalidJob),
        ({"prompt": [1] * 1024}, InvalidJob),
        ({"hooks": "blocks.3.hook_nothing"}, UnknownHook),
        ({"hooks": "blocks.30.hook_resid_post"}, UnsupportedHook),
        ({"positions": 999}, InvalidJob),
        ({"positions": []}, InvalidJob),
        ({"interventions": add("resid_post.3", np.ones(575))}, InvalidJob),
        ({"interventions": add("resid_post.3", np.full(576, np.nan))}, InvalidJob),
        ({"interventions": zero("logits")}, UnsupportedHook),
    ],
)
async def test_wrong_calls_are_refused_before_anything_is_queued(
    client: Client, arguments: dict[str, Any], kind: type[InvalidJob]
) -> None:
    await client.card()
    before = await client._queue.redis.dbsize()
    with pytest.raises(kind) as error:
        await client.capture(**({"prompt": PROMPT, "hooks": "embed"} | arguments))
    assert error.value.job_id is None
    assert await client._queue.redis.dbsize() == before


async def test_a_bad_job_that_slips_through_fails_alone(client: Client) -> None:
    """Documents as a broken client would write them: the worker checks once more, and neighbours are served."""
    from lenspool.job import prepare

    card = await client.card()
    tokenizer = (await client._connect())[1].tokenizer
    narrow = np.ones(3, dtype=np.float32)
    ref = await client.put(narrow)
    good = [asyncio.create_task(client.capture(f"A good job, number {i}", STREAM)) for i in range(20)]
    request = prepare(card, tokenizer, PROMPT, "embed", interventions=add("resid_post.3", 1.0))
    document = request.document({"hook_embed": [(0, 3)]})
    edit = document["interventions"][0]
    bad = [
        document | {"interventions": [edit | {"value": {"array": ref.digest}}]},
        document | {"interventions": [edit | {"value": {"array": "0" * 64}}]},
        document | {"interventions": [edit | {"hook": "blocks.99.hook_resid_post"}]},
        document | {"tokens": [10**6]},
        document | {"v": 99},
        document | {"tokens": [1] * 5000, "captures": []},
    ]
    failures = await asyncio.gather(*(client._queue.submit(card.id, b).result() for b in bad), return_exceptions=True)
    assert [type(f) for f in failures] == [InvalidJob, InvalidJob, UnknownHook, InvalidJob, InvalidJob, InvalidJob]
    assert all(f.job_id for f in failures)  # type: ignore[union-attr]
    for result in await asyncio.gather(*good):
        assert np.isfinite(result["resid_post.29"]).all()


async def test_client_without_the_store_gets_the_same_through_redis(client: Client, store: Path) -> None:
    near = await client.capture("A notebook far away", ["resid_post.2", "logits"])
    async with Client(client.url, store=False) as far_client:
        vector = np.random.default_rng(1).normal(size=576)
        far = await far_client.capture("A notebook far away", ["resid_post.2", "logits"])
        assert far.cached
        assert all(far[name].tobytes() == near[name].tobytes() for name in near)
        edited = await far_client.capture(
            "A notebook far away", "resid_post.3", interventions=add("resid_post.2", vector)
        )
        assert not edited.cached and np.isfinite(edited["resid_post.3"]).all()
        text = await far_client.generate("A notebook far away", max_tokens=4, hooks="resid_post.2")
        assert text.text and text["resid_post.2"].shape == (len(text.prompt_token_ids) + 3, 576)
    async with Client(client.url, store=False, inline_limit=10_000) as small:
        with pytest.raises(InvalidJob, match="inline_limit"):
            await small.capture("A notebook far away", ["resid_post.2", "logits"])


async def test_flipped_byte_is_a_miss_and_is_computed_again(client: Client, store: Path) -> None:
    prompt, hook = "A damaged entry heals itself", "resid_post.11"
    first = await client.capture(prompt, hook)
    good = first[hook].copy()
    needle = good[-1].tobytes()[:64]  # the first row is that of every prompt that begins with the same token
    for pack in (store / "packs").glob("*.h5"):
        data = pack.read_bytes()
        at = data.find(needle)
        if at >= 0:
            with pack.open("r+b") as stream:
                stream.seek(at)
                stream.write(bytes([data[at] ^ 1]))
            break
    else:
        pytest.fail("the rows were not found in any pack")
    second = await client.capture(prompt, hook)
    with pytest.raises(CacheCorrupt):
        second[hook]
    third = await client.capture(prompt, hook)
    assert not third.cached
    assert relative(third[hook], good) <= 1e-6


async def test_deadline_and_cancellation(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.generate("A very long story", max_tokens=900, ignore_eos=True, timeout=1.0)
    task = asyncio.create_task(client.generate("Another long story", max_tokens=900, ignore_eos=True))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if (await counters(client))["live"] == 0:
            break
    else:
        pytest.fail("the engine still runs a cancelled job")
    assert (await client.capture("All is well again", "embed"))["embed"].shape[1] == 576


async def test_models_and_hooks(client: Client) -> None:
    (card,) = await client.models()
    assert card.name == "smollm2-135m-instruct" and card.n_layers == 30
    assert card.context["numerics"]["dtype"] == "float32"
    infos = {info.name: info for info in await client.hooks()}
    for layer in range(30):
        for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"):
            info = infos[f"blocks.{layer}.hook_{name}"]
            assert info.width == 576 and info.editable
    assert infos["unembed.hook_out"].width == 49152 and not infos["unembed.hook_out"].editable
    async with Client(client.url, model="no-such-model") as other:
        with pytest.raises(UnknownModel) as error:
            await other.capture("x", "embed")
        assert error.value.available == ["smollm2-135m-instruct"]


async def test_map_keeps_order_and_reports_errors_in_place(client: Client) -> None:
    prompts: list[Any] = [f"Row {i} of a data set" for i in range(30)]
    prompts[7] = ""
    results = [
        r async for r in client.map(prompts, "resid_post.1", positions="last", concurrency=8, return_exceptions=True)
    ]
    assert len(results) == 30
    assert isinstance(results[7], InvalidJob)
    for i, result in enumerate(results):
        if i != 7:
            assert "".join(result.tokens) == prompts[i]
    with pytest.raises(InvalidJob):
        async for _ in client.map(prompts, "resid_post.1", concurrency=8):
            pass
