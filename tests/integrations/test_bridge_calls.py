"""Batches, masks, filters, hooks, generation and life of a bridge."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import lenspool.sync
from lenspool import Client
from lenspool.integrations.transformer_lens import PoolBridge, boot_pool
from tests.e2e.conftest import counters
from tests.integrations.conftest import TOKENS, far

BAND = 1e-5
PROMPTS = ["The capital of France is", "Hi", "A somewhat longer prompt, of more tokens than the others have"]
HOOK = "blocks.7.hook_out"
PATTERN = "blocks.7.attn.hook_pattern"


def test_the_driver_keeps_to_the_protocol(bridge: PoolBridge) -> None:
    from transformer_lens.model_bridge.driver_protocol import Driver, validate_driver

    driver = bridge._driver
    validate_driver(driver, after_bridge_construction=True)
    assert isinstance(driver, Driver)
    assert driver.provides_sequence_logits and driver.supports("weight_access") and not driver.supports("gradients")
    assert torch.equal(driver.get_param("lm_head.weight"), driver.get_param("model.embed_tokens.weight"))
    assert driver.get_param("model.norm.weight").shape == (576,)
    assert driver.get_param("no.such.weight") is None


def test_rows_of_a_batch_equal_single_prompts(bridge: PoolBridge) -> None:
    """Right padding as TransformerLens's: zeros, and -inf for logits; whether the mask is ours or the caller's."""
    logits, cache = bridge.run_with_cache(PROMPTS, names_filter=[HOOK, PATTERN])
    lengths = [len(bridge.to_tokens(prompt)[0]) for prompt in PROMPTS]
    assert logits.shape[:2] == (3, max(lengths)) == cache[HOOK].shape[:2]
    tokens = bridge.to_tokens(PROMPTS)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).int()
    masked_logits, masked = bridge.run_with_cache(tokens, names_filter=[HOOK, PATTERN], attention_mask=mask)
    assert torch.equal(masked_logits, logits) and torch.equal(masked[HOOK], cache[HOOK])
    ragged = bridge([bridge.to_tokens(prompt)[0].tolist() for prompt in PROMPTS])
    assert torch.equal(ragged, logits)
    for i, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True)):
        own_logits, own = bridge.run_with_cache(prompt, names_filter=[HOOK, PATTERN])
        assert torch.equal(logits[i, :length], own_logits[0])
        assert torch.equal(cache[HOOK][i, :length], own[HOOK][0])
        assert torch.equal(cache[PATTERN][i, :, :length, :length], own[PATTERN][0])
        assert (logits[i, length:] == float("-inf")).all()
        assert not cache[HOOK][i, length:].any() and not cache[PATTERN][i, :, length:].any()


def test_loss_of_a_batch(bridge: PoolBridge, oracle: Any) -> None:
    """Of what is no padding, whether the mask is the bridge's or the caller's."""
    tokens = oracle.to_tokens(PROMPTS)
    lengths = [len(oracle.to_tokens(prompt)[0]) for prompt in PROMPTS]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).int()
    expected = oracle(tokens, attention_mask=mask, return_type="loss")
    each = oracle(tokens, attention_mask=mask, return_type="loss", loss_per_token=True)
    for input, options in ((PROMPTS, {}), (tokens, {"attention_mask": mask})):
        assert abs(bridge(input, return_type="loss", **options) - expected) < 1e-4
        assert far(bridge(input, return_type="loss", loss_per_token=True, **options), each) < BAND


def test_masks_move_rows_and_positions(bridge: PoolBridge) -> None:
    padded = torch.cat([torch.full((1, 3), 2), TOKENS, torch.full((1, 2), 2)], dim=1)
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0])
    spec = {HOOK: {"op": "suppress", "pos": [4]}}
    logits, cache = bridge.run_with_cache(padded, names_filter=HOOK, attention_mask=mask, intervene=spec)
    own_logits, own = bridge.run_with_cache(TOKENS, names_filter=HOOK, intervene={HOOK: {"op": "suppress", "pos": 1}})
    assert torch.equal(logits[:, 3:9], own_logits) and torch.equal(cache[HOOK][:, 3:9], own[HOOK])
    assert (logits[:, [0, 1, 2, 9, 10]] == float("-inf")).all() and not cache[HOOK][:, [0, 1, 2, 9, 10]].any()
    with pytest.raises(ValueError, match=r"outside the unmasked prompt positions \[3, 9\)"):
        bridge(padded, attention_mask=mask, intervene={HOOK: {"op": "suppress", "pos": 1}})
    for wrong, message in [
        ([0, 1, 1, 0, 1, 1], "cannot have gaps"),
        ([0] * 6, "must retain at least one"),
        ([1, 1, 1, 1, 1, 2], "must be 0 or 1"),
        ([1, 1], "one value per input token"),
    ]:
        with pytest.raises(ValueError, match=message):
            bridge(TOKENS, attention_mask=torch.tensor(wrong))
    with pytest.raises(ValueError, match="for 2 prompts"):
        bridge([[1, 2], [3, 4]], attention_mask=torch.ones(3, 2))


def test_every_row_may_have_its_own_edits(bridge: PoolBridge) -> None:
    """D11, B1: other lengths, other edits, one continuous batch; and positions together with batches."""
    specs = [{HOOK: {"op": "scale", "factor": 2}}, None, {HOOK: {"op": "set", "value": 0.5, "pos": [2, 3]}}]
    logits = bridge(PROMPTS, intervene=specs)
    for i, (prompt, spec) in enumerate(zip(PROMPTS, specs, strict=True)):
        own = bridge(prompt, intervene=spec)
        assert torch.equal(logits[i, : own.shape[1]], own[0])
    with pytest.raises(ValueError, match="beyond the prompt length"):
        bridge([[1, 2, 3], [1, 2, 4]], intervene={HOOK: {"op": "suppress", "pos": 3}})


def test_names_filter_in_every_form(bridge: PoolBridge) -> None:
    def keys(names_filter: Any, **options: Any) -> set[str]:
        return set(bridge.run_with_cache(TOKENS, names_filter=names_filter, return_type=None, **options)[1].keys())

    alias = "blocks.7.hook_resid_post"
    assert keys(HOOK) == {HOOK}
    assert keys(alias) == {HOOK, alias}
    assert keys([alias, "blocks.7.attn.hook_z"]) >= {alias, "blocks.7.attn.hook_z"}
    assert keys(lambda name: name.startswith("blocks.7.ln1.")) == {
        f"blocks.7.ln1.hook_{name}" for name in ("in", "scale", "normalized", "out")
    }
    with pytest.raises(KeyError, match="matched no hook points"):
        keys("blocks.7.nonsense")
    _, cache = bridge.run_with_cache(TOKENS, names_filter=alias, pos_slice=-1, remove_batch_dim=True)
    assert cache[HOOK].shape == (1, 576)
    _, plain = bridge.run_with_cache(TOKENS, names_filter=[HOOK], pos_slice=(1, 3), return_cache_object=False)
    assert isinstance(plain, dict) and plain[HOOK].shape == (1, 2, 576)
    assert torch.equal(cache["resid_post", 7], cache[HOOK])


def test_hooks_see_what_was_captured(bridge: PoolBridge) -> None:
    seen: list[torch.Tensor] = []

    def look(value: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append(value.clone())
        return value * 0

    with pytest.warns(UserWarning, match="read-only"):
        logits = bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.7.hook_resid_post", look)])
    assert torch.equal(logits, bridge(TOKENS)) and len(seen) == 1
    with bridge.hooks(fwd_hooks=[(HOOK, look)]):
        bridge(TOKENS)
    bridge(TOKENS)
    bridge.add_hook(HOOK, look)
    bridge(TOKENS)
    bridge.reset_hooks()
    bridge(TOKENS)
    assert len(seen) == 3 and all(torch.equal(value, seen[0]) for value in seen)
    with pytest.raises(NotImplementedError, match="backward"):
        bridge.run_with_hooks(TOKENS, bwd_hooks=[(HOOK, look)])
    with pytest.raises(NotImplementedError, match="stop_at_layer"):
        bridge(TOKENS, stop_at_layer=3)


def test_only_what_is_asked_for_moves(bridge: PoolBridge) -> None:
    """A9, B10: bytes follow the request."""
    driver = bridge._driver
    assert driver.forward(TOKENS, capture=(), return_logits=False).raw_output == []
    result = driver.forward(TOKENS, capture=(HOOK,), return_logits=False)
    assert result.logits is None and set(result.captured) == {HOOK}
    (capture,) = result.raw_output
    assert sum(array.nbytes for array in capture.arrays().values()) == TOKENS.numel() * 576 * 4


def test_generation_and_its_captures(bridge: PoolBridge, oracle: Any) -> None:
    """D12, B2: greedy text is TransformerLens's, rows of generated tokens are those of a forward over them."""
    greedy = {"max_new_tokens": 8, "do_sample": False}
    text = bridge.generate("The capital of France is", **greedy)
    assert text == oracle.generate("The capital of France is", verbose=False, **greedy)
    tokens = bridge.generate(TOKENS, **greedy)
    assert tokens.shape == (1, 14) and bridge.tokenizer.decode(tokens[0], skip_special_tokens=True) == text
    result = bridge._driver.forward(TOKENS, capture=(HOOK,), max_new_tokens=8)
    assert torch.equal(result.new_tokens, tokens[:, 6:])
    logits, cache = bridge.run_with_cache(tokens[:, :-1], names_filter=HOOK)
    assert far(result.captured[HOOK], cache[HOOK]) < BAND and far(result.logits, logits) < BAND
    both, after, fed = bridge.generate(TOKENS, return_cache=True, return_input_tokens=True, names_filter=HOOK, **greedy)
    assert torch.equal(both, tokens) and torch.equal(fed, TOKENS) and after[HOOK].shape == (1, 14, 576)


def test_generation_under_an_edit(bridge: PoolBridge, oracle: Any) -> None:
    spec = {HOOK: {"op": "add", "value": torch.linspace(-20, 20, 576)}}
    edited = bridge.generate(TOKENS, max_new_tokens=6, do_sample=False, intervene=spec)
    tokens = TOKENS
    for _ in range(6):  # without a cache of keys and values: every step edits all positions
        hooks = [(HOOK, lambda x, hook: x + spec[HOOK]["value"])]
        logits = oracle.run_with_hooks(tokens, fwd_hooks=hooks)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(edited, tokens)
    assert not torch.equal(edited, bridge.generate(TOKENS, max_new_tokens=6, do_sample=False))


def test_generation_of_a_batch(bridge: PoolBridge) -> None:
    texts = bridge.generate(PROMPTS[:2], max_new_tokens=4, do_sample=False)
    assert texts == [bridge.generate(prompt, max_new_tokens=4, do_sample=False) for prompt in PROMPTS[:2]]
    options = {"max_new_tokens": 6, "temperature": 1.5, "seed": 3, "top_k": 50}
    assert bridge.generate("Once", **options) == bridge.generate("Once", **options)
    stopped = bridge.generate("1, 2, 3,", max_new_tokens=16, do_sample=False, stop_strings=" 5")
    assert stopped.endswith(" 5")


async def test_a_repeat_comes_from_the_store(bridge: PoolBridge, client: Client) -> None:
    """B6; and that a bridge works inside a running event loop, as in a notebook."""
    prompt = torch.tensor([[1, 1111, 2222, 3333]])
    first, cache = bridge.run_with_cache(prompt, names_filter=HOOK)
    before = await counters(client)
    again, stored = bridge.run_with_cache(prompt, names_filter=HOOK)
    assert (await counters(client))["steps"] == before["steps"]
    assert torch.equal(first, again) and torch.equal(cache[HOOK], stored[HOOK])


def test_threads_share_a_bridge(bridge: PoolBridge) -> None:
    """D17."""
    prompts = [torch.tensor([[1, 500 + i, 600 + i]]) for i in range(6)]
    found: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        spec = {HOOK: {"op": "set", "value": float(i)}}
        found[i] = bridge.run_with_cache(prompts[i], names_filter=HOOK, return_type=None, intervene=spec)[1][HOOK]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all((found[i] == i).all() for i in range(6))


def test_a_bridge_is_closed_and_the_pool_goes_on(bridge: PoolBridge, client: Client, smollm2: Any) -> None:
    with boot_pool(str(smollm2), client.url, store=bridge.card.store_path) as other:
        assert torch.equal(other(TOKENS), bridge(TOKENS))
    with lenspool.sync.Client(client.url, store=bridge.card.store_path) as sync, boot_pool(str(smollm2), sync) as third:
        assert torch.equal(third(TOKENS), bridge(TOKENS))
    other.close()
    assert other._driver.get_param("lm_head.weight") is None
    with pytest.raises(RuntimeError, match="closed"):
        other(TOKENS)
    assert bridge(TOKENS).shape == (1, 6, 49152)


def test_wrong_input(bridge: PoolBridge) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        bridge()
    with pytest.raises(ValueError, match="input_ids"):
        bridge(torch.zeros(1, 2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="input_ids"):
        bridge([[1, 2], []])
    with pytest.raises(TypeError, match="no_such"):
        bridge(TOKENS, no_such=1)
    with pytest.raises(ValueError, match="return_type"):
        bridge(TOKENS, return_type="nothing")
    with pytest.raises(ValueError, match="max_new_tokens"):
        bridge._driver.forward(TOKENS, max_new_tokens=0)
