"""The pool that is pretended, for users' tests: shapes and kinds are right, calls are checked as ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lenspool.sync
from lenspool import Capture, Client, InvalidJob, ModelCard, PoolUnavailable, UnknownHook, add, at
from lenspool.readouts import entropy, lens, loss, norm, project, reduce, sae, top_k
from lenspool.testing import FakePool, fake_card

TEXT = "a naïve test"


async def test_every_hook_has_its_shape() -> None:
    card = fake_card(n_layers=3, d_model=24, n_heads=3, n_kv_heads=1, vocab_size=300)
    client = FakePool(card).client()
    infos = await client.hooks()
    result = await client.capture(TEXT, [info.name for info in infos])
    length = len(TEXT.encode())
    sizes = {"pos": length, "q_pos": length, "k_pos": length, "d_model": 24, "head": 3, "kv_head": 1, "d_head": 8}
    sizes |= {"d_mlp": 32, "d_vocab": 300, "1": 1}
    for info in infos:
        assert result[info.name].shape == tuple(sizes[d] for d in info.shape), info.name
        assert result[info.name].dtype == np.float32 and np.isfinite(result[info.name]).all()
    pattern = result["pattern.2"]
    assert np.allclose(pattern.sum(-1), 1) and not np.triu(pattern, 1).any()
    assert "".join(result.tokens or []).replace("\ufffd", "") == "a nave test"
    assert ModelCard.from_dict(card.to_dict()) == card


async def test_equal_calls_have_equal_answers_and_others_do_not() -> None:
    client, again = FakePool().client(), FakePool().client()
    first = await client.capture(TEXT, "resid_post.1")
    assert (await again.capture(TEXT, "resid_post.1"))["resid_post.1"].tobytes() == first["resid_post.1"].tobytes()
    part = await client.capture(TEXT, "resid_post.1", positions=at("naïve"))
    assert np.array_equal(part["resid_post.1"], first["resid_post.1"][2:8])
    edited = await client.capture(TEXT, "resid_post.1", interventions=add("resid_post.0", np.ones(16)))
    assert not np.array_equal(edited["resid_post.1"], first["resid_post.1"])
    pool = FakePool(fake_card(dtype="bfloat16"))
    assert (await pool.client().capture([1, 2], "embed"))["embed"].dtype.name == "bfloat16"
    assert [len(request.tokens) for request in pool.requests] == [2]


async def test_readouts_are_of_their_kind() -> None:
    client = FakePool().client()
    weights = np.ones((16, 40)), np.zeros(40)
    asked = [
        top_k("logits", 5), lens("resid_post.0", k=3), loss(), entropy(), norm("z.0"), reduce("z.1", "mean"),
        project("embed", np.ones((16, 2))), sae("embed", *weights, k=4),
    ]  # fmt: skip
    result: Capture = await client.capture(TEXT, asked)
    top = result[asked[0]]
    assert top.indices.shape == (13, 5) and (np.diff(top.values) <= 0).all() and (top.indices < 512).all()
    assert all(len(set(row)) == 5 for row in top.indices.tolist())
    assert result[loss()].shape == (12,) and (result[loss()] >= 0).all() and (result[norm("z.0")] >= 0).all()
    assert result[asked[5]].shape == (2, 8) and result[asked[6]].shape == (13, 2)
    assert (result[asked[7]].active == 4).all() and (result[asked[7]].indices < 40).all()


async def test_generations_streams_and_many() -> None:
    async with FakePool().client() as client:
        made = await client.generate(TEXT, max_tokens=5, hooks="resid_post.0")
        assert len(made.token_ids) == len(made.text or "") == 5 and made["resid_post.0"].shape == (17, 16)
        assert (await client.generate(TEXT, max_tokens=5)).text == made.text
        stream = client.stream(TEXT, max_tokens=5)
        assert "".join([delta.text async for delta in stream]) == made.text
        drawn = await client.generate(TEXT, n=3, temperature=1.0, max_tokens=8)
        assert len({one.text for one in drawn}) == 3
        assert [r.cached async for r in client.map(["a", "b"], "embed")] == [True, True]
        assert (await client.plan(["a", "b"], "embed")).hits == 2
        assert (await client.norms("resid_post.0"))["blocks.0.hook_resid_post"] > 0


async def test_no_interventions_may_be_none() -> None:
    client = FakePool().client()
    await client.capture(TEXT, "embed")
    assert (await client.capture(TEXT, "embed", interventions=None)).cached


async def test_wrong_calls_are_refused_as_by_a_real_pool() -> None:
    client = FakePool().client()
    with pytest.raises(UnknownHook):
        await client.capture(TEXT, "resid_pots.0")
    with pytest.raises(InvalidJob, match="positions"):
        await client.capture(TEXT, "embed", positions=99)
    with pytest.raises(InvalidJob, match="shape"):
        await client.capture(TEXT, "embed", interventions=add("embed", np.ones(15)))
    with pytest.raises(InvalidJob, match="interventions: got int"):
        await client.capture(TEXT, "embed", interventions=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidJob, match="log-probabilities"):
        await client.generate(TEXT, logprobs=1)
    for call in (client.status(), client.submit_capture(TEXT, "embed")):
        with pytest.raises(PoolUnavailable, match="no queue"):
            await call
    with pytest.raises(ValueError, match="256"):
        fake_card(vocab_size=100)


async def test_one_text_in_place_of_prompts_is_refused() -> None:
    """Its letters would run, each as a prompt."""
    client = FakePool().client()
    wrong: Any = TEXT
    with pytest.raises(InvalidJob, match="prompts: is one text"):
        async for _ in client.map(wrong, "resid_post.0"):
            pass
    for call in (client.plan(wrong, "resid_post.0"), client.norms("resid_post.0", wrong)):
        with pytest.raises(InvalidJob, match="prompts: is one text"):
            await call


def test_a_client_says_whose_it_is_and_no_password() -> None:
    assert repr(Client("redis://me:secret@host", model="m")) == "<Client of redis://me:***@host, model m>"
    assert repr(lenspool.sync.Client("redis://host")) == "<sync Client of redis://host, model (the one)>"
