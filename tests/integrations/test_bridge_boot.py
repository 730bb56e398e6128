"""`boot_pool`: its arguments, the architectures, and what is not the model."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, LayoutLMConfig

from lenspool import Client
from lenspool.card import ModelCard
from lenspool.integrations.transformer_lens import PoolBridge, boot_pool
from lenspool.testing import FakePool
from lenspool.testing.fake_model import fake_card
from tests.e2e.test_snippets import snippets
from tests.integrations.conftest import TOKENS

DIMS = {"n_layers": 30, "d_model": 576, "n_heads": 9, "n_kv_heads": 3, "d_mlp": 1536, "vocab_size": 49152}


@pytest.fixture(autouse=True)
def no_pool_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LENSPOOL_REDIS", raising=False)


@pytest.fixture(scope="module")
def pool() -> FakePool:
    return FakePool(fake_card(**DIMS))


@pytest.fixture(scope="module")
def fake(smollm2: Path, pool: FakePool) -> Iterator[PoolBridge]:
    with boot_pool(str(smollm2), pool.client()) as bridge:
        yield bridge


def test_the_module_is_light() -> None:
    code = "import sys, lenspool.integrations.transformer_lens\n"
    code += "print({'torch', 'transformer_lens'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_without_transformerlens_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_lens.model_bridge", None)
    with pytest.raises(ImportError, match=r"lenspool\[transformer-lens\]"):
        boot_pool("model")


def test_the_page_runs(smollm2: Path, client: Client) -> None:
    """docs/transformer_lens.md."""
    (snippet,) = snippets(Path(__file__).parents[2] / "docs" / "transformer_lens.md")
    assert '"path/to/model", "redis://localhost:6379"' in snippet
    snippet = snippet.replace("path/to/model", str(smollm2)).replace("redis://localhost:6379", client.url)
    names: dict[str, Any] = {"tokens": TOKENS, "vector": torch.ones(576)}
    exec(compile(snippet, "transformer_lens.md", "exec"), names)
    assert set(names["cache"].keys()) == {"blocks.5.hook_out", "blocks.5.hook_resid_post"}  # a name and its alias
    assert names["edited"].shape == (1, TOKENS.shape[1], 49152)


def test_a_call_of_boot_vllm_runs(smollm2: Path, pool: FakePool) -> None:
    """With all its arguments; those of an engine that runs already are noted."""
    arguments = {
        "model_name": str(smollm2),
        "tokenizer": AutoTokenizer.from_pretrained(smollm2),
        "dtype": torch.float32,
        "gpu_memory_utilization": 0.3,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "enable_batching": True,
        "enable_position_interventions": True,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        "swap_space": 1,
    }
    with pytest.warns(
        UserWarning, match="gpu_memory_utilization, max_num_batched_tokens, pipeline_parallel_size, swap_space"
    ):
        bridge = boot_pool(**arguments, client=pool.client())
    long = bridge([[1] * 100, [2] * 80], intervene={"blocks.0.hook_out": {"op": "suppress", "pos": 70}})
    assert long.shape == (2, 100, 49152)
    bridge.close()


def test_a_call_without_arguments_notes_nothing(smollm2: Path, pool: FakePool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        boot_pool(str(smollm2), pool.client(), enable_batching=True).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size.*positive int; got 0"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size.*positive int; got '2'"),
        ({"tensor_parallel_size": True}, "positive int"),
        ({"disable_log_stats": False}, "forces disable_log_stats=True"),
        ({"dtype": torch.bfloat16}, "served in float32"),
        ({"max_model_len": 10**6}, "max_model_len.*up to 1024"),
        ({"served_as": "other"}, "own settings"),
    ],
)
def test_arguments_that_conflict_are_refused(
    arguments: dict[str, Any], message: str, smollm2: Path, pool: FakePool
) -> None:
    with pytest.raises(ValueError, match=message):
        boot_pool(str(smollm2), pool.client(), **arguments)


def test_another_model_than_the_served_one_is_refused(smollm2: Path) -> None:
    with pytest.raises(ValueError, match="is not fake"):
        boot_pool(str(smollm2), FakePool().client())


def test_a_tokenizer_is_no_client(smollm2: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer=") as caught:
        boot_pool(str(smollm2), AutoTokenizer.from_pretrained(smollm2))
    assert "GPT2Tokenizer" in str(caught.value) or "Tokenizer" in str(caught.value)


def test_an_unknown_architecture_fails_before_any_engine(tmp_path: Path) -> None:
    config = LayoutLMConfig(architectures=["LayoutLMModel"])
    config.save_pretrained(tmp_path)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"LayoutLM|architecture"):
        boot_pool(str(tmp_path))
    assert time.monotonic() - began < 5  # a pool takes longer to start


def gpt2_card() -> ModelCard:
    """What a worker says of a small GPT-2: no gated MLP, no rotary, positions of its own."""
    card = fake_card(n_layers=2, d_model=16, n_heads=2, n_kv_heads=2, d_mlp=32, vocab_size=49152)
    hooks = {name: info for name, info in card.hooks.items() if "pre_linear" not in name}
    hooks["hook_pos_embed"] = dataclasses.replace(card.hooks["hook_embed"], name="hook_pos_embed")
    return dataclasses.replace(card, architecture="GPT2LMHeadModel", hooks=hooks)


def test_other_trees_than_llama(smollm2: Path, tmp_path: Path) -> None:
    """D16: GPT-2's modules have other names; TransformerLens's hook names are the same."""
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=49152)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    card = gpt2_card()
    with boot_pool(str(tmp_path), FakePool(card).client(), tokenizer=AutoTokenizer.from_pretrained(smollm2)) as bridge:
        _, cache = bridge.run_with_cache([1, 2, 3])
        expected = {name for name in card.hooks if not name.endswith("hook_result")}
        assert expected <= set(cache.keys())
        assert cache["blocks.1.mlp.hook_pre"].shape == (1, 3, 32)
        assert cache["blocks.1.attn.hook_z"].shape == (1, 3, 2, 8)
        edited = bridge([1, 2, 3], intervene={"blocks.1.attn.hook_q": {"op": "suppress"}})
        assert not torch.equal(edited, bridge([1, 2, 3]))


def test_one_job_per_row_and_hooks_as_asked(fake: PoolBridge, pool: FakePool) -> None:
    """What reaches the pool: the row's tokens without padding, its own edits, and the hooks once each."""
    pool.requests.clear()
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    names = ["blocks.3.hook_resid_post", "blocks.4.hook_in", "blocks.3.hook_out"]
    specs = [{"blocks.0.hook_out": {"op": "scale", "factor": 3, "pos": 2}}, {}]
    fake.run_with_cache([[7, 8, 9], [4, 5, 6]], names_filter=names, attention_mask=mask, intervene=specs)
    first, second = pool.requests
    assert (first.tokens, second.tokens) == ([8, 9], [4, 5, 6])
    (edit,) = first.interventions
    assert (edit["hook"], edit["op"], edit["factor"]) == ("blocks.0.hook_resid_post", "scale", 3.0)
    assert edit["ranges"] == [[1, 2]]
    assert second.interventions == []
    assert first.hooks == ["blocks.3.hook_resid_post", "blocks.4.hook_resid_pre", "unembed.hook_out"]


def test_keys_of_results_follow_what_is_asked(fake: PoolBridge, pool: FakePool) -> None:
    """B13: equal meaning is one key in any spelling; another value, hook, position or token is another."""

    def key(tokens: Any = TOKENS, **options: Any) -> str:
        pool.requests.clear()
        fake(tokens, **options)
        return pool.requests[0].run.entry("unembed.hook_out").hex()

    def scaled(factor: Any, hook: str = "blocks.5.hook_out", **more: Any) -> str:
        return key(intervene={hook: {"op": "scale", "factor": factor, **more}})

    same = {
        scaled(2),
        scaled(2.0),
        scaled(torch.tensor(2.0)),
        scaled(2, "resid_post.5"),
        scaled(2, pos=[0, 1, 2, 3, 4, 5]),
    }
    assert len(same) == 1
    other = {scaled(3), scaled(2, "blocks.6.hook_out"), scaled(2, pos=1), key(), key(TOKENS + 1)}
    assert len(other | same) == 6
    assert pool.card.context["numerics"] == {"dtype": "float32"}


def test_weights_of_another_model_are_refused(fake: PoolBridge) -> None:
    """The fake pool's logits are not those of the checkpoint."""
    with pytest.raises(ValueError, match="are not those of fake"):
        _ = fake.W_U


def test_weights_are_read_only_when_used(smollm2: Path, tmp_path: Path, pool: FakePool) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    with boot_pool(str(tmp_path), pool.client()) as bridge:
        assert bridge(TOKENS).shape == (1, 6, 49152)
        with pytest.raises(FileNotFoundError, match="has no safetensors"):
            _ = bridge.ln_final
