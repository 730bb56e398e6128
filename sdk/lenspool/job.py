"""Requests: from a call's arguments to a checked job document and the content key of its run.

`prepare` is what the client does before anything is queued. `lenspool.checks` is its twin on the worker's side.
"""

from __future__ import annotations

import hashlib
import operator
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from lenspool import entries
from lenspool import positions as ps
from lenspool.card import ModelCard
from lenspool.edit_documents import to_documents
from lenspool.errors import InvalidJob
from lenspool.requested import resolve
from lenspool.sampling import check_sampling
from lenspool.sizes import check_bytes
from lenspool.tokenizer import Tokenizer
from lenspool_cache import Run, canonical_json
from lenspool_cache import ranges as rg
from lenspool_cache.ranges import OpenRange, Range

VERSION = 1
Reuse = Literal["prefix", "none"]
GENERATION = "generation"
"""Name of the store entry that holds the token ids and the text of a generation."""


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes
    ----------
    hooks
        Canonical names in network order, and names of readouts' entries (`lenspool.entries`).
    ranges
        Positions to capture; the last range of a generation may be open.
    arrays
        Digest -> array that the job needs and that may have to be sent first.
    nonce
        Set when the answer must not be reused (sampling without a seed).
    reuse
        `"prefix"`, or `"none"`: the run stands alone, and is computed in one piece.
    """

    card: ModelCard
    tokens: list[int]
    hooks: list[str]
    ranges: list[OpenRange]
    interventions: list[dict[str, Any]]
    arrays: dict[str, np.ndarray]
    sampling: dict[str, Any] | None = None
    nonce: str | None = None
    reuse: Reuse = "prefix"

    @property
    def run(self) -> Run:
        """Identity of the computation in the store."""
        return run_of(self.document({}), self.card.context)

    def resampled(self, seed: int | None) -> Request:
        """The same, for another sample: with that seed, or a new one without."""
        assert self.sampling is not None
        nonce = uuid.uuid4().hex if seed is None else None
        return replace(self, sampling={**self.sampling, "seed": seed}, nonce=nonce)

    def ranges_of(self, name: str) -> list[OpenRange]:
        """Positions at which a hook or an entry of a readout has rows in this request."""
        if not entries.is_readout(name):
            return self.ranges
        return entries.parse(name).rows(self.ranges, len(self.tokens))

    @property
    def whole(self) -> dict[str, Sequence[OpenRange]]:
        """All rows of this request, as `document` takes them."""
        return {name: self.ranges_of(name) for name in self.hooks}

    def document(self, missing: Mapping[str, Sequence[OpenRange]]) -> dict[str, Any]:
        """Job document that asks for the given rows of this request: hook -> ranges.

        Raises
        ------
        InvalidJob
            The rows take more bytes than a job may.
        """
        groups: dict[tuple[OpenRange, ...], list[str]] = {}
        for name, wanted in missing.items():
            groups.setdefault(tuple(wanted), []).append(name)
        captures = [{"hooks": names, "ranges": [list(r) for r in wanted]} for wanted, names in groups.items()]
        check_bytes(captures, self.card, _end(self.tokens, self.sampling))
        document = {
            "v": VERSION,
            "kind": "capture" if self.sampling is None else "generate",
            "model": self.card.id,
            "tokens": self.tokens,
            "captures": captures,
            "interventions": self.interventions,
            "sampling": self.sampling,
        }
        if self.reuse == "none":
            document["reuse"] = "none"
        return document if self.nonce is None else {**document, "nonce": self.nonce}


def job_id(document: Mapping[str, Any]) -> str:
    """Id of a job by its content: equal documents are one job."""
    return hashlib.sha256(canonical_json(document)).hexdigest()[:40]


def run_of(document: Mapping[str, Any], context: Mapping[str, Any]) -> Run:
    """The run that a capture or generate document belongs to, in a model context."""
    run = {"v": VERSION, "context": context, **{k: document[k] for k in ("tokens", "interventions", "sampling")}}
    return Run(run | {k: document[k] for k in ("nonce", "reuse") if k in document})


def prepare(
    card: ModelCard,
    tokenizer: Tokenizer | None,
    prompt: Any,
    hooks: Any,
    positions: Any = "all",
    interventions: Any = (),
    sampling: dict[str, Any] | None = None,
    norms: Mapping[str, float] | None = None,
    reuse: Reuse = "prefix",
) -> Request:
    """Check a call's arguments and make them a request.

    Raises
    ------
    InvalidJob
        Or a subclass; nothing has been queued.
    """
    reuse = "none" if card.no_prefix_reuse else check_reuse(reuse)
    tokens = tokenize(card, tokenizer, prompt)
    room = card.max_model_len - (sampling["max_tokens"] if sampling else 1)
    if room < 1 and sampling and len(tokens) < card.max_model_len:  # no prompt would fit
        most = f"at most {card.max_model_len - len(tokens)} after this prompt (max_model_len {card.max_model_len})"
        raise InvalidJob("max_tokens", f"got {sampling['max_tokens']}", most)
    if len(tokens) > room:
        more = f" with max_tokens={sampling['max_tokens']}" if sampling else ""
        raise InvalidJob(
            "prompt", f"has {len(tokens)} tokens", f"at most {room}{more} (max_model_len {card.max_model_len})"
        )
    if sampling is not None:
        check_sampling(sampling, len(tokens), card)
    generating = sampling is not None
    wanted = ps.resolve(positions, len(tokens), generating=generating)
    names, matrices = resolve(hooks, card, wanted, len(tokens), _end(tokens, sampling), generating=generating)
    if not names and not generating:
        raise InvalidJob("hooks", "no hook was asked for", "at least one hook name")
    edits, arrays = to_documents(interventions, card, tokens, generating=generating, norms=norms)
    random = sampling is not None and sampling["temperature"] > 0 and sampling["seed"] is None
    nonce = uuid.uuid4().hex if random else None
    return Request(card, tokens, names, wanted, edits, arrays | matrices, sampling, nonce, reuse)


def check_reuse(reuse: Any) -> Reuse:
    """Refuse what is no way to take rows of other runs."""
    if reuse not in get_args(Reuse):
        raise InvalidJob("reuse", f"got {reuse!r}", ", ".join(map(repr, get_args(Reuse))))
    return reuse


def _end(tokens: Sequence[int], sampling: Mapping[str, Any] | None) -> int:
    """Positions that have activations, at most: a generation's last token is never fed back."""
    return len(tokens) + (sampling["max_tokens"] - 1 if sampling else 0)


def tokenize(card: ModelCard, tokenizer: Tokenizer | None, prompt: Any) -> list[int]:
    """Token ids of a prompt: text, chat messages or token ids (taken verbatim).

    Raises
    ------
    InvalidJob
        Empty, of another type, or a token id outside the vocabulary.
    """
    allowed = "text, a list of messages, or a list of token ids"
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, (str, list, tuple)):
        raise InvalidJob("prompt", f"got {type(prompt).__name__}", allowed)
    if len(prompt) == 0:
        raise InvalidJob("prompt", "is empty", allowed)
    if isinstance(prompt[0], (str, list, tuple)) and not isinstance(prompt, str):
        raise InvalidJob("prompt", "is a list of prompts", "one prompt; Client.map takes several")
    if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
        if tokenizer is None:
            raise InvalidJob("prompt", f"{card.name} was served without a tokenizer", "a list of token ids")
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
        if not tokens:
            raise InvalidJob("prompt", "has no tokens", allowed)
    else:
        tokens = _token_ids(prompt)
    check_tokens(tokens, card)
    return tokens


def _token_ids(prompt: Sequence[Any]) -> list[int]:
    out = []
    for i, item in enumerate(prompt):
        if isinstance(item, bool):
            raise InvalidJob(f"prompt[{i}]", f"got {item!r}", "token ids are ints")
        try:
            out.append(operator.index(item))
        except TypeError:
            raise InvalidJob(f"prompt[{i}]", f"got {item!r}", "token ids are ints") from None
    return out


def check_tokens(tokens: Sequence[int], card: ModelCard) -> None:
    """Refuse token ids outside the vocabulary."""
    for i, token in enumerate(tokens):
        if not 0 <= token < card.vocab_size:
            raise InvalidJob(f"prompt[{i}]", f"token id {token} is outside the vocabulary", f"0..{card.vocab_size - 1}")


def closed(ranges: Sequence[OpenRange], length: int) -> list[Range]:
    """Ranges of a request once the number of positions with activations is known."""
    return rg.close(ranges, length)
