"""Checks of what the pool serves, and of the store."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lenspool.card import ModelCard
from lenspool.doctor.finding import Finding
from lenspool_cache import CacheError, Store
from lenspool_cache.mounts import is_network

_LITTLE = 5 * 2**30


def check_workers(cards: Sequence[ModelCard], model: str | None) -> list[Finding]:
    """Does somebody serve the model that calls would go to, and on the engine that this version knows?"""
    if not cards:
        advice = "start one: lenspool worker --model DIR --redis URL --store DIR"
        return [Finding("workers", "error", "no live worker", advice)]
    said = ", ".join(f"{card.id} ({card.dtype}, {card.context['numerics'].get('device')})" for card in cards)
    found = [Finding("workers", "ok", f"serving {said}")]
    fitting = [card for card in cards if model in (None, card.name, card.id)]
    if model is not None and not fitting:
        names = ", ".join(sorted({card.name for card in cards}))
        found.append(Finding("model", "error", f"no worker serves {model!r}", f"set LENSPOOL_MODEL to one of {names}"))
    elif len(fitting) > 1:
        advice = f"name one: LENSPOOL_MODEL={fitting[0].id}"
        found.append(Finding("model", "warning", f"{len(fitting)} models fit, so calls without a name fail", advice))
    return found


def check_store(folder: str | Literal[False] | None, cards: Sequence[ModelCard]) -> list[Finding]:
    """Is there a store that this client reaches, the workers' own, writable, and with room?"""
    about = "store"
    if folder is False:
        return [Finding(about, "note", "set to false: results come through Redis, up to inline_limit each")]
    named = Path(folder).expanduser() if folder else None
    places = [named] if named is not None else [Path(p) for p in dict.fromkeys(c.store_path for c in cards) if p]
    if not places:
        return [Finding(about, "note", "none is set, and no worker names one", "set LENSPOOL_STORE to see it checked")]
    return [finding for place in places for finding in _check_folder(place, named is not None, cards)]


def _check_folder(folder: Path, was_named: bool, cards: Sequence[ModelCard]) -> list[Finding]:
    if not (folder / "store.json").is_file():
        if not was_named:
            said = f"{folder}, the workers', is not reachable from here: results come through Redis"
            return [Finding("store", "note", said, "mount it here, or set LENSPOOL_STORE to where it is mounted")]
        if cards:
            return [Finding("store", "error", f"{folder} holds no store", "set LENSPOOL_STORE to the workers' folder")]
        return [Finding("store", "note", f"{folder} holds no store yet: the first worker makes it")]
    try:
        with Store(folder, read_only=True) as store:
            identity, size = store.id, store.disk_bytes()
    except (CacheError, OSError) as error:
        return [Finding("store", "error", f"{folder}: {error}", "lenspool cache verify --repair --store DIR")]
    found = [Finding("store", "ok", f"{folder}, {size / 2**20:.0f} MiB")]
    others = sorted({card.name for card in cards if card.store_id != identity})
    if others:
        said = f"{folder} is another store than that of the workers of {', '.join(others)}"
        state: Any = "error" if was_named else "warning"
        found.append(Finding("store", state, said, "give workers and clients the same folder (a shared one)"))
    elif cards:
        found.append(Finding("store", "ok", "it is the one that the workers write to: hits need no queue"))
    if not os.access(folder, os.W_OK):
        said = "this user cannot write to it, so arrays (steering vectors) travel through Redis"
        found.append(Finding("store", "note", said, "give the user's group write access to the folder"))
    free = shutil.disk_usage(folder).free
    if free < _LITTLE:
        advice = "free some, or limit the store: lenspool worker --cache-bytes N, lenspool cache gc"
        found.append(Finding("disk", "warning", f"{free / 2**30:.1f} GiB are free at {folder}", advice))
    else:
        found.append(Finding("disk", "ok", f"{free / 2**30:.0f} GiB are free at {folder}"))
    if is_network(folder):
        advice = "each process reads the index of all packs when it opens the store (docs/store.md)"
        found.append(Finding("store", "note", "it lies on a network file system", advice))
    return found


def version_of(*names: str) -> str:
    """Version of the first of these distributions that is installed; empty when none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
