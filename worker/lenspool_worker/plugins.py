"""Which of vLLM's plugins a worker loads: all that vLLM would, but for other people's taps.

vLLM runs every installed entry point of `vllm.general_plugins` in each of its processes. TransformerLens brings one
that replaces `Worker.load_model` to install its own hooks; beside a lenspool worker it is seconds of imports at every
boot, and a second party in the forward pass.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

TAPS = frozenset({"tl_vllm_capture"})
"""Plugins that instrument models."""

_GROUPS = ("general", "platform", "io_processor", "stat_logger")
_ONLY_WHEN_NAMED = frozenset({"lora_hf_hub_resolver"})
"""Plugins that do nothing unless `VLLM_PLUGINS` names them: it must not be this module that does."""


def keep_out_taps() -> None:
    """Set `VLLM_PLUGINS` to what is installed without `TAPS`; to be called before vLLM is imported.

    Nothing happens where the variable is set already, or where no such plugin is installed.
    """
    if "VLLM_PLUGINS" in os.environ:
        return
    installed = {plugin.name for group in _GROUPS for plugin in entry_points(group=f"vllm.{group}_plugins")}
    if installed & TAPS:
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(installed - TAPS - _ONLY_WHEN_NAMED))
