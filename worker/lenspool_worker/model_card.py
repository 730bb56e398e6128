"""What a worker publishes about its model: the card, and the tokenizer that clients use."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenspool.card import HookInfo, ModelCard
from lenspool_cache import Store
from lenspool_cache.keys import canonical_json

if TYPE_CHECKING:
    from lenspool_worker.engine import Engine


VOCABULARY_VERSION = 1
"""Raised when a hook's meaning changes: results of another vocabulary are other results."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder comes with a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def model_name(folder: Path) -> str:
    """Default name of a model: its folder's, lower case, with only letters, digits, dots and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", folder.resolve().name.lower()).strip("-") or "model"


def tokenizer_blob(folder: Path) -> bytes | None:
    """The model's tokenizer as clients need it, as canonical JSON; None when the folder has none that is fast.

    The state is taken from the loaded tokenizer, not from its file: loading may change it (which special tokens it
    adds).
    """
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer  # heavy

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not getattr(tokenizer, "is_fast", False):
        return None
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
    special = {name: getattr(tokenizer, name, None) for name in names}
    return canonical_json(
        {
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "chat_template": template,
            "special_tokens": {name: str(token) for name, token in special.items() if token is not None},
        }
    )


def make_card(
    engine: Engine, *, name: str, fingerprint: str, tokenizer: bytes | None, store: Store, worker: str
) -> ModelCard:
    """The card of a started engine."""
    info: dict[str, Any] = dict(engine.info)
    context = {"model": fingerprint, "numerics": info.pop("numerics"), "vocabulary": VOCABULARY_VERSION}
    return ModelCard(
        id=f"{name}@{hashlib.sha256(canonical_json(context)).hexdigest()[:12]}",
        name=name,
        context=context,
        hooks={h["name"]: hook_info(h) for h in engine.hooks},
        refusals=engine.refusals,
        tokenizer=hashlib.sha256(tokenizer).hexdigest() if tokenizer is not None else None,
        store_id=store.id,
        store_path=str(store.path.resolve()),
        worker=worker,
        **info,
    )


def hook_info(hook: Mapping[str, Any]) -> HookInfo:
    """A hook of the engine as the card lists it."""
    return HookInfo(
        hook["name"], hook["width"], hook["editable"], tuple(hook["shape"]), tuple(hook["dims"]), hook["dtype"]
    )
