"""The worker's check of a job document, as strict as if a stranger had written it into the queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lenspool import entries
from lenspool.card import ModelCard
from lenspool.edit_forms import check_edits
from lenspool.errors import InvalidJob, UnknownHook
from lenspool.job import VERSION, check_tokens
from lenspool.positions import check_ranges
from lenspool.sampling import check_integer, check_sampling, sampling_document
from lenspool.sizes import check_bytes

KINDS = ("capture", "generate", "fetch")

_FIELDS = {"v", "kind", "model", "tokens", "captures", "interventions", "sampling", "nonce", "reuse"}


def check(document: Any, card: ModelCard) -> None:
    """Check a document against the card of the model that is to run it.

    Raises
    ------
    InvalidJob
        Or a subclass, naming the field.
    """
    if not isinstance(document, dict):
        raise InvalidJob("document", f"got {type(document).__name__}", "a JSON object")
    if document.get("v") != VERSION:
        raise InvalidJob("v", f"document version {document.get('v')!r}", f"version {VERSION}")
    kind = document.get("kind")
    if kind not in KINDS:
        raise InvalidJob("kind", f"got {kind!r}", ", ".join(KINDS))
    if document.get("model") != card.id:
        raise InvalidJob("model", f"the job is for {document.get('model')!r}", card.id)
    if kind == "fetch":
        _check_fetch(document)
        return
    if extra := set(document) - _FIELDS:
        raise InvalidJob("document", f"unknown fields {sorted(extra)}", ", ".join(sorted(_FIELDS)))
    tokens = document.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int for t in tokens):
        raise InvalidJob("tokens", "not a list of ints, or empty", "at least one token id")
    check_tokens(tokens, card)
    sampling = document.get("sampling")
    if (kind == "generate") != isinstance(sampling, dict):
        raise InvalidJob("sampling", f"got {sampling!r} for a {kind}", "an object for generate, null for capture")
    if isinstance(sampling, dict):
        try:
            normal = sampling_document(**sampling)
        except TypeError as error:
            raise InvalidJob("sampling", str(error)) from None
        if normal != sampling:
            raise InvalidJob("sampling", f"got {sampling!r}", f"the canonical form {normal!r}")
        check_sampling(sampling, len(tokens), card)
    length = len(tokens) + (sampling["max_tokens"] if sampling else 1)
    if length > card.max_model_len:
        raise InvalidJob("tokens", f"prompt and generation take {length} tokens", f"max_model_len {card.max_model_len}")
    if not isinstance(document.get("nonce", ""), str):
        raise InvalidJob("nonce", "not a string")
    if document.get("reuse", "none") != "none":
        raise InvalidJob("reuse", f"got {document['reuse']!r}", "'none', or no such field")
    if card.no_prefix_reuse and "reuse" not in document:
        raise InvalidJob("reuse", f"runs of this model do not share rows: {card.no_prefix_reuse}", "'none'")
    # a generation's last token is never fed back, so it has no position
    end = len(tokens) + (sampling["max_tokens"] - 1 if sampling else 0)
    _check_captures(document.get("captures"), card, end, len(tokens), generating=kind == "generate")
    check_bytes(document["captures"], card, end)
    check_edits(document.get("interventions"), card.hooks, end, generating=kind == "generate")


def _check_fetch(document: Mapping[str, Any]) -> None:
    if not isinstance(document.get("run"), dict):
        raise InvalidJob("run", "not a run document", "a JSON object")
    names = document.get("names")
    if not isinstance(names, dict) or not names:
        raise InvalidJob("names", "not an object of entry name -> ranges", "at least one")
    for name, ranges in names.items():
        check_ranges(ranges, f"names.{name}", None, may_be_open=True)
    check_integer("limit", document.get("limit"), 1, None)


def _check_captures(captures: Any, card: ModelCard, end: int, n_prompt: int, *, generating: bool) -> None:
    if not isinstance(captures, list):
        raise InvalidJob("captures", "not a list", "a list of {hooks, ranges}")
    seen: set[str] = set()
    for i, group in enumerate(captures):
        if not isinstance(group, dict) or not isinstance(group.get("hooks"), list):
            raise InvalidJob(f"captures[{i}]", "not an object with hooks and ranges")
        check_ranges(group.get("ranges"), f"captures[{i}].ranges", end, may_be_open=generating)
        for name in group["hooks"]:
            if isinstance(name, str) and entries.is_readout(name):
                _check_readout(name, group["ranges"], card, end, n_prompt, f"captures[{i}]", generating=generating)
            else:
                _check_hook(name, card, f"captures[{i}].hooks")
            if name in seen:
                raise InvalidJob(f"captures[{i}].hooks", f"{name} is asked for twice")
            seen.add(name)


def _check_readout(
    name: str, ranges: list[list[int | None]], card: ModelCard, end: int, n_prompt: int, at: str, *, generating: bool
) -> None:
    entry = entries.parse(name, f"{at}.hooks")
    entries.check(entry, card, f"{at}.hooks", end, generating=generating)
    if entry.part not in entries.OPS[entry.op].parts:
        raise InvalidJob(f"{at}.hooks", f"{name!r} has several arrays", ", ".join(e.name for e in entry.stored))
    allowed = entry.rows([(r[0] or 0, r[1]) for r in ranges], n_prompt)
    if ranges != [list(r) for r in allowed]:
        raise InvalidJob(f"{at}.ranges", f"{entry.op} has no rows at {ranges}", f"{[list(r) for r in allowed]}")


def _check_hook(name: Any, card: ModelCard, field: str) -> None:
    if not isinstance(name, str) or name not in card.hooks:
        raise UnknownHook(str(name), field=field)
