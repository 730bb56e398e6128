"""The bridge gives the numbers of TransformerLens's own torch path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lenspool.integrations.transformer_lens import PoolBridge
from tests.integrations import golden
from tests.integrations.conftest import TOKENS, far

BAND = 1e-5


@pytest.fixture(scope="module")
def caches(bridge: PoolBridge, oracle: Any) -> tuple[Any, Any]:
    """Everything that either fires, and the logits, for one prompt.

    Of the oracle in two runs: where it computes results per head, its `o.hook_out` does not fire.
    """
    with torch.no_grad():
        logits, theirs = oracle.run_with_cache(TOKENS)
        bridge.set_use_attn_result(True)
        oracle.set_use_attn_result(True)
        try:
            per_head = oracle.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("hook_result"))[1]
            ours = bridge.run_with_cache(TOKENS)
        finally:
            bridge.set_use_attn_result(False)
            oracle.set_use_attn_result(False)
    theirs.cache_dict |= per_head.cache_dict
    return ours, (logits, theirs)


def test_every_hook_equals_transformerlens(caches: Any, bridge: PoolBridge) -> None:
    (_, ours), (_, theirs) = caches
    served = bridge._driver.supported_hook_points
    assert len(served) > 900
    assert served <= set(ours.keys()) <= set(theirs.keys())
    worst = max((far(ours[name], theirs[name]), name) for name in ours)
    assert worst[0] <= BAND, worst


def test_golden_numbers(caches: Any, bridge: PoolBridge) -> None:
    """Of TransformerLens in an environment of its own, with other versions of what it stands on (`make oracle`)."""
    document = json.loads((Path(__file__).parent / "golden.json").read_text())
    assert document["tokens"] == golden.TOKENS
    (logits, cache), _ = caches
    assert int(logits[0, -1].argmax()) == document["argmax"]
    served = {name: numbers for name, numbers in document["hooks"].items() if name in cache.keys()}  # noqa: SIM118
    assert len(served) > 90
    pairs = [(name, cache[name], numbers) for name, numbers in served.items()] + [
        ("logits", logits, document["logits"])
    ]
    specs = {"suppress": {}, "scale": {"factor": 2.0}, "add": {"value": 1.5}, "set": {"value": 1.5}}
    for op, numbers in document["edits"].items():
        pairs.append((op, bridge(TOKENS, intervene={golden.EDITED: {"op": op, **specs[op]}}), numbers))
    for name, got, (norm, signed) in pairs:
        ours = golden.summary(got)
        assert abs(ours[0] - norm) <= BAND * norm and abs(ours[1] - signed) <= BAND * norm, name


def test_what_only_torch_fires_is_said_to_be_absent(caches: Any, bridge: PoolBridge) -> None:
    (_, ours), (_, theirs) = caches
    missing = set(theirs.keys()) - set(ours.keys())
    assert missing <= bridge._driver.non_fireable_hook_points
    assert {name.rpartition(".")[2] for name in missing} == {"hook_in", "hook_cos", "hook_sin"}
    with pytest.raises(NotImplementedError, match=r"rotary_emb\.hook_cos"):
        bridge.run_with_cache(TOKENS, names_filter="rotary_emb.hook_cos")


def test_identities_hold(caches: Any) -> None:
    (logits, cache), _ = caches
    for layer in (0, 13, 29):
        block = f"blocks.{layer}."
        assert far(cache[block + "hook_in"] + cache[block + "attn.hook_out"], cache[block + "ln2.hook_in"]) < BAND
        assert far(cache[block + "ln2.hook_in"] + cache[block + "mlp.hook_out"], cache[block + "hook_out"]) < BAND
        pre, linear = cache[block + "mlp.hook_pre"], cache[block + "mlp.hook_pre_linear"]
        assert far(torch.nn.functional.silu(pre) * linear, cache[block + "mlp.hook_post"]) < BAND
        scale = cache[block + "ln1.hook_scale"]
        assert far(cache[block + "hook_in"] / scale, cache[block + "ln1.hook_normalized"]) < BAND
        values = cache[block + "attn.hook_v"].repeat_interleave(3, dim=2)
        mixed = torch.einsum("bhqk,bkhd->bqhd", cache[block + "attn.hook_pattern"], values)
        assert far(mixed, cache[block + "attn.hook_z"]) < BAND
        assert far(cache[block + "attn.hook_result"].sum(2), cache[block + "attn.hook_out"]) < BAND
    assert torch.equal(cache["unembed.hook_out"], logits)


def test_logits_and_loss(caches: Any, bridge: PoolBridge, oracle: Any) -> None:
    (ours, _), (theirs, _) = caches
    assert far(ours, theirs) <= BAND
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert bridge.to_single_str_token(int(ours[0, -1].argmax())) == " Paris"
    loss = bridge(TOKENS, return_type="loss")
    assert abs(loss - oracle(TOKENS, return_type="loss")) < 1e-4
    each = bridge(TOKENS, return_type="loss", loss_per_token=True)
    assert far(each, oracle(TOKENS, return_type="loss", loss_per_token=True)) < BAND
    logits, both = bridge(TOKENS, return_type="both")
    assert torch.equal(logits, ours) and both == loss
    assert bridge(TOKENS, return_type=None) is None
    labels = torch.tensor([[-100, -100, 3575, 282, 17, 314]])
    assert (
        abs(bridge(TOKENS, return_type="loss", labels=labels) - oracle(TOKENS, return_type="loss", labels=labels))
        < 1e-4
    )
    with pytest.raises(ValueError, match="logits batch and position"):
        bridge(TOKENS, return_type="loss", labels=labels[:, :3])


def test_cache_tools(caches: Any, bridge: PoolBridge, oracle: Any) -> None:
    """What needs the final norm and the unembedding on this side, too (D14, D15)."""
    (_, ours), (_, theirs) = caches
    assert far(bridge.W_U, oracle.W_U) == 0
    assert torch.equal(bridge.b_U, oracle.b_U)
    for options in ({}, {"apply_ln": True}, {"apply_ln": True, "incl_mid": True}, {"layer": 7}):
        got, names = ours.accumulated_resid(**options, return_labels=True)
        expected, expected_names = theirs.accumulated_resid(**options, return_labels=True)
        assert names == expected_names
        assert far(got, expected) < BAND
    got, names = ours.decompose_resid(apply_ln=True, return_labels=True)
    assert far(got, theirs.decompose_resid(apply_ln=True)) < BAND
    assert far(ours.logit_attrs(got, tokens=" Paris"), theirs.logit_attrs(got, tokens=" Paris")) < BAND
    difference = {"tokens": " Paris", "incorrect_tokens": " London"}
    assert far(ours.logit_attrs(got, **difference), theirs.logit_attrs(got, **difference)) < BAND
    assert far(ours.stack_head_results(), theirs.stack_head_results()) < BAND
    assert far(ours.stack_activation("resid_pre"), theirs.stack_activation("resid_pre")) < BAND
    # the torch path of the same arrays: nothing is recomputed in another way here
    resid = theirs["resid_post", 5]
    assert torch.equal(bridge.ln_final(resid), oracle.ln_final(resid))


def test_logit_lens(caches: Any) -> None:
    (_, ours), (_, theirs) = caches
    options = {"layers": [0, 15, 29], "vocab": [7042, 0]}
    assert far(ours.logit_lens(**options).values, theirs.logit_lens(**options).values) < BAND


def test_head_results_are_switched_on_or_refused(bridge: PoolBridge) -> None:
    _, cache = bridge.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("hook_z"), return_type=None)
    with pytest.raises(AttributeError, match=r"set_use_attn_result\(True\)"):
        cache.stack_head_results()


def test_tokens_equal_transformerlens(bridge: PoolBridge, oracle: Any) -> None:
    text = ["The capital of France is", "Hi", " two  spaces\n"]
    for input in (text[0], text):
        for bos in (True, False, None):
            assert torch.equal(bridge.to_tokens(input, prepend_bos=bos), oracle.to_tokens(input, prepend_bos=bos))
    for side in ("left", "right"):
        assert torch.equal(bridge.to_tokens(text, padding_side=side), oracle.to_tokens(text, padding_side=side))
    assert bridge.to_string(TOKENS) == oracle.to_string(TOKENS)
    assert bridge.to_str_tokens(text[0]) == oracle.to_str_tokens(text[0])
    assert bridge.to_single_token(" Paris") == oracle.to_single_token(" Paris")
    assert bridge.get_token_position(" France", text[0]) == oracle.get_token_position(" France", text[0])
    directions = torch.tensor([7042, 12])
    assert torch.equal(
        bridge.tokens_to_residual_directions(directions), oracle.tokens_to_residual_directions(directions)
    )
    assert torch.equal(bridge.tokens_to_residual_directions(" Paris"), oracle.tokens_to_residual_directions(" Paris"))


def test_text_equals_its_tokens(bridge: PoolBridge) -> None:
    ours = bridge("The capital of France is")
    assert torch.equal(ours, bridge(TOKENS))
    bare = bridge("The capital of France is", prepend_bos=False)
    assert bare.shape[1] == 5 and torch.equal(bare, bridge(TOKENS[:, 1:]))
