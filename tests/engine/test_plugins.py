"""Other people's taps stay out of the engine: TransformerLens registers some as a plugin of vLLM."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import pytest

from lenspool_worker.plugins import TAPS, keep_out_taps
from tests.engine.asking import Asker

vllm_plugins = pytest.importorskip("vllm.plugins")
pytest.importorskip("transformer_lens.model_bridge.sources.vllm.plugin")


def test_vllm_would_load_the_plugin_and_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    group = vllm_plugins.DEFAULT_PLUGINS_GROUP
    installed = {plugin.name for plugin in entry_points(group=group)}
    assert "tl_vllm_capture" in installed & TAPS

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert "tl_vllm_capture" in vllm_plugins.load_plugins_by_group(group)
    keep_out_taps()
    loaded = set(vllm_plugins.load_plugins_by_group(group))
    assert loaded == installed - TAPS - {"lora_hf_hub_resolver"}  # which does nothing unless a user names it
    assert loaded


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "tl_vllm_capture,mine")
    keep_out_taps()
    assert os.environ["VLLM_PLUGINS"] == "tl_vllm_capture,mine"


def test_an_engine_is_booted_without_it(engine: Asker) -> None:
    """vLLM's processes inherit the variable; in this one vLLM has loaded its plugins, and its worker is its own."""
    from vllm.v1.worker.gpu_worker import Worker

    assert engine.engine.alive
    assert vllm_plugins.plugins_loaded
    assert not TAPS & set(os.environ["VLLM_PLUGINS"].split(","))
    assert Worker.load_model.__module__ == "vllm.v1.worker.gpu_worker"
