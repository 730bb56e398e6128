"""Names of readouts: what a worker computes from a hook's rows, so that only a few numbers are stored and sent.

A name is `<hook>|<op>(<arguments>)`, for example `unembed.hook_out|top_k(10)`; with `lens.` before the op it reads the
logits that the final norm and the unembedding make of a residual stream. Arguments are JSON; arrays stand there by
digest. An op that gives several arrays has one stored entry for each, with its part at the end:
`unembed.hook_out|top_k(10).indices`. Equal readouts have equal names, which are part of the store's keys.

The ops are a closed vocabulary, checked here for the client and for the worker alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lenspool.card import HookInfo, ModelCard
from lenspool.errors import InvalidJob, UnknownHook, UnsupportedHook
from lenspool.hooks import template
from lenspool.positions import check_ranges
from lenspool_cache.ranges import OpenRange

LOGITS = "unembed.hook_out"
ACTIVATIONS = ("relu", "topk", "jumprelu")
MAX_TOKEN_IDS = 1024

_STREAM = {"hook_embed", *(f"blocks.{{layer}}.hook_resid_{part}" for part in ("pre", "mid", "post"))}
_NAME = re.compile(r"([^|]+)\|(lens\.)?([a-z_]+)\((.*)\)(?:\.([a-z]+))?", re.DOTALL)
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Op:
    """One op of the vocabulary.

    Attributes
    ----------
    parts
        Name of each array that it gives -> numpy dtype; one array has the name `""`.
    arguments
        Names, for errors.
    of_logits
        It makes sense of logits only.
    reduces
        It gives one row for all positions, which are its argument.
    """

    parts: dict[str, str]
    arguments: tuple[str, ...] = ()
    of_logits: bool = False
    reduces: bool = False


_PICKED = {"indices": "int32", "values": "float32"}
OPS: dict[str, Op] = {
    "top_k": Op(_PICKED, ("k",)),
    "logprobs": Op({"": "float32"}, ("token_ids",), of_logits=True),
    "logits_of": Op({"": "float32"}, ("token_ids",), of_logits=True),
    "rank": Op({"": "int32"}, ("token_ids",), of_logits=True),
    "entropy": Op({"": "float32"}, of_logits=True),
    "loss": Op({"": "float32"}, of_logits=True),
    "norm": Op({"": "float32"}),
    "project": Op({"": "float32"}, ("matrix", "columns")),
    "sae": Op(
        {**_PICKED, "active": "int32"},
        ("activation", "k", "features", "W_enc", "b_enc", "b_dec", "threshold"),
    ),
    "mean": Op({"": "float32"}, ("ranges",), reduces=True),
    "max": Op({"": "float32"}, ("ranges",), reduces=True),
}


@dataclass(frozen=True)
class Entry:
    """A readout of one hook, or with `part` one of its stored arrays."""

    hook: str
    op: str
    args: tuple[Any, ...] = ()
    lens: bool = False
    part: str = ""

    @property
    def name(self) -> str:
        """Canonical name."""
        args = json.dumps(self.args, separators=(",", ":"))[1:-1]
        part = f".{self.part}" if self.part else ""
        return f"{self.hook}|{'lens.' if self.lens else ''}{self.op}({args}){part}"

    @property
    def whole(self) -> Entry:
        """The readout that this is a part of."""
        return replace(self, part="")

    @property
    def stored(self) -> list[Entry]:
        """The entries that hold the readout's arrays."""
        return [replace(self, part=part) for part in OPS[self.op].parts]

    @property
    def reduces(self) -> bool:
        """Whether there is one row for all positions."""
        return OPS[self.op].reduces

    @property
    def in_step(self) -> bool:
        """Whether it is computed in each step, from logits that are then dropped."""
        return self.lens or (self.hook == LOGITS and not self.reduces)

    @property
    def arrays(self) -> dict[str, str]:
        """Argument -> digest."""
        if self.op == "project":
            return {"matrix": self.args[0]}
        if self.op == "sae":
            return {n: d for n, d in zip(OPS["sae"].arguments[3:], self.args[3:], strict=True) if d is not None}
        return {}

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Shape that each array argument must have over rows of that width."""
        if self.op == "project":
            return {"matrix": (width, self.args[1])}
        features = self.args[2] if self.op == "sae" else 0
        all_ = {"W_enc": (width, features), "b_enc": (features,), "b_dec": (width,), "threshold": (features,)}
        return {name: all_[name] for name in self.arrays}

    def rows(self, ranges: Sequence[OpenRange], n_prompt: int) -> list[OpenRange]:
        """Positions at which the readout has rows, when these positions are asked for."""
        if self.reduces:
            return [(0, 1)]
        if self.op == "loss":
            ends = [(start, n_prompt - 1 if stop is None else min(stop, n_prompt - 1)) for start, stop in ranges]
            return [(start, stop) for start, stop in ends if start < stop]
        return list(ranges)

    def reads(self, ranges: Sequence[OpenRange]) -> list[OpenRange]:
        """Positions of the hook's rows that rows at these positions are computed from."""
        return [(start, stop) for start, stop in self.args[0]] if self.reduces else list(ranges)


def is_readout(name: str) -> bool:
    """Whether a name is a readout's, not a hook's."""
    return "|" in name


def parse(name: str, field: str = "hooks") -> Entry:
    """The readout of a name, which must be canonical; arguments are not checked.

    Raises
    ------
    InvalidJob
        The name is not one of a readout.
    """
    match = _NAME.fullmatch(name)
    try:
        args = _tuples(json.loads(f"[{match[4]}]")) if match else ()
    except (ValueError, RecursionError):
        match = None
    if not match or match[3] not in OPS:
        raise InvalidJob(field, f"{name!r} is not a readout", f"<hook>|<op>(...) with an op of {', '.join(OPS)}")
    entry = Entry(match[1], match[3], args, match[2] is not None, match[5] or "")
    if entry.name != name or (entry.part and entry.part not in OPS[entry.op].parts):
        raise InvalidJob(field, f"{name!r} is not canonical", f"like {entry.whole.name!r}")
    return entry


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def check(entry: Entry, card: ModelCard, field: str, end: int, *, generating: bool) -> None:
    """Check a readout against a model's card.

    Parameters
    ----------
    field
        How errors call what the hook stands in.
    end
        Number of positions of the run; a generation's ranges may be open.

    Raises
    ------
    InvalidJob
        Or a subclass; names the argument as `<op>.<argument>`.
    """
    hook = card.hooks.get(entry.hook)
    if hook is None:
        raise UnknownHook(entry.hook, field=field)
    op, at = OPS[entry.op], entry.op
    if len(entry.args) != len(op.arguments):
        raise InvalidJob(at, f"has {len(entry.args)} arguments", ", ".join(op.arguments) or "none")
    if entry.lens:
        _check_lens(entry, card)
    elif op.of_logits and entry.hook != LOGITS:
        raise InvalidJob(at, f"{entry.hook} has no logits", f"{LOGITS}, or a residual stream through lens")
    width = width_read(entry, card)
    if width == 0:
        raise UnsupportedHook(entry.hook, "its rows are as wide as the prompt is long", field=at)
    if entry.op == "top_k":
        _check_count(entry.args[0], width, f"{at}.k")
    elif op.arguments == ("token_ids",):
        _check_token_ids(entry.args[0], card, f"{at}.token_ids")
    elif entry.op == "project":
        _check_count(entry.args[1], None, f"{at}.columns")
        _check_digest(entry.args[0], f"{at}.matrix")
    elif entry.op == "sae":
        _check_sae(entry.args)
    elif op.reduces:
        check_ranges(_lists(entry.args[0]), f"{at}.ranges", end, may_be_open=generating)


def _lists(value: Any) -> Any:
    return list(map(_lists, value)) if isinstance(value, tuple) else value


def _check_lens(entry: Entry, card: ModelCard) -> None:
    if (not OPS[entry.op].of_logits and entry.op != "top_k") or entry.op == "loss":
        raise InvalidJob("lens", f"{entry.op} is no readout of the lens", "top_k, logprobs, logits_of, rank, entropy")
    if template(entry.hook) not in _STREAM:
        raise InvalidJob("lens", f"{entry.hook} is not the residual stream", "hook_embed, hook_resid_pre|mid|post")
    numerics = card.context.get("numerics", {})
    if numerics.get("pipeline_parallel", 1) != 1:
        reason = "the model runs as a pipeline, and only its last process has the unembedding"
        raise UnsupportedHook(entry.hook, reason, field="lens")
    if "ln_final.hook_out" not in card.hooks:
        raise UnsupportedHook(entry.hook, card.refusals.get("ln_final.hook_out", "no final norm"), field="lens")


def _check_count(value: Any, most: int | None, field: str) -> None:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise InvalidJob(field, f"got {value!r}", f"an int from 1{'' if most is None else f' to {most}'}")


def _check_token_ids(ids: Any, card: ModelCard, field: str) -> None:
    if not isinstance(ids, tuple) or not 1 <= len(ids) <= MAX_TOKEN_IDS:
        raise InvalidJob(field, f"got {len(ids) if isinstance(ids, tuple) else ids!r}", f"1 to {MAX_TOKEN_IDS} ids")
    for token in ids:
        if type(token) is not int or not 0 <= token < card.vocab_size:
            raise InvalidJob(field, f"{token!r} is no id of the vocabulary", f"0..{card.vocab_size - 1}")


def _check_digest(value: Any, field: str) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise InvalidJob(field, f"got {value!r}", "the digest of an array: 64 hex digits")


def _check_sae(args: tuple[Any, ...]) -> None:
    activation, k, features, w_enc, b_enc, b_dec, threshold = args
    if activation not in ACTIVATIONS:
        raise InvalidJob("sae.activation", f"got {activation!r}", ", ".join(ACTIVATIONS))
    _check_count(features, None, "sae.features")
    _check_count(k, features, "sae.k")
    _check_digest(w_enc, "sae.W_enc")
    _check_digest(b_enc, "sae.b_enc")
    if b_dec is not None:
        _check_digest(b_dec, "sae.b_dec")
    if (threshold is not None) != (activation == "jumprelu"):
        raise InvalidJob("sae.threshold", f"got {threshold!r} for {activation}", "an array for jumprelu, else none")
    if threshold is not None:
        _check_digest(threshold, "sae.threshold")


def width_read(entry: Entry, card: ModelCard) -> int:
    """Numbers per position of what the op reads."""
    return card.vocab_size if entry.lens else card.hooks[entry.hook].width


def info(entry: Entry, card: ModelCard) -> HookInfo:
    """Shape and dtype of a stored entry's rows, like those of a hook.

    The first dimension is `pos`; reductions have none.
    """
    hook, args = card.hooks[entry.hook], entry.args
    dims: tuple[int, ...] = ()
    if entry.op == "top_k":
        dims = (args[0],)
    elif OPS[entry.op].arguments == ("token_ids",):
        dims = (len(args[0]),)
    elif entry.op == "project" or (entry.op == "sae" and entry.part != "active"):
        dims = (args[1],)
    elif entry.reduces:
        dims = hook.dims or (hook.width,)
    width = 1
    for size in dims:
        width *= size
    shape = hook.shape[1:] if entry.reduces else ("pos", *("k" for _ in dims))
    return HookInfo(entry.name, width, False, shape, dims, OPS[entry.op].parts[entry.part])
