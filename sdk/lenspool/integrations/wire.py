"""TransformerLens's wire form, in which its inspect providers are asked for activations and edits, and give rows.

::

    {"capture": ["5:resid_post"], "interventions": {"3:attn_out": {"op": "add", "value": [...], "pos": [2, 3]}}}
    {"5:resid_post": {"data": "<base64, C order>", "dtype": "float32", "shape": [6, 576]}}

Keys are `<layer>:<kind>`; shapes have no batch dimension. Here an edit may also have any other hook for its key, any op
of `lenspool.interventions` that takes numbers, and a list of edits of one hook in place of one.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from lenspool import hooks as hk
from lenspool import interventions as iv
from lenspool.card import ModelCard
from lenspool.errors import InvalidJob

_NAMES = {
    "resid_pre": "hook_in",
    "resid_mid": "ln2.hook_in",
    "resid_post": "hook_out",
    "attn_out": "attn.hook_out",
    "mlp_out": "mlp.hook_out",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "pattern": "attn.hook_pattern",
}
KINDS = tuple(_NAMES)
"""What a wire key may name in a block."""

_KEYS = f'"<layer>:<kind>" with one of the kinds {", ".join(KINDS)}'

_Op = tuple[Callable[..., iv.Intervention], tuple[str, ...], tuple[str, ...]]
OPS: dict[str, _Op] = {
    "suppress": (iv.zero, (), ()),
    "zero": (iv.zero, (), ()),
    "scale": (iv.scale, ("factor",), ()),
    "add": (iv.add, ("value",), ("coefficient", "relative")),
    "set": (iv.set_, ("value",), ()),
    "interpolate": (iv.interpolate, ("value", "alpha"), ()),
    "steer": (iv.steer, ("value",), ("coefficient", "relative", "norm")),
    "project_out": (iv.project_out, ("value",), ("coefficient",)),
    "clamp": (iv.clamp, ("value",), ("min", "max")),
}
"""Op -> function, what it needs, what it may have. The first four are TransformerLens's."""

_WHERE = {"pos": "positions", "phase": "phase", "where_token": "where_token", "heads": "heads", "units": "units"}


class InvalidWire(InvalidJob, ValueError):
    """A request in wire form is wrong; a ValueError too, as callers of TransformerLens's providers expect."""


def wire_keys(card: ModelCard) -> dict[str, str]:
    """Wire key -> canonical hook, of all that a model serves."""
    table = {}
    for layer in range(card.n_layers):
        for kind, name in _NAMES.items():
            try:
                table[f"{layer}:{kind}"] = hk.resolve(f"blocks.{layer}.{name}", card)[0]
            except InvalidJob:
                continue  # this model has none; `hook_of` says why when somebody asks
    return table


def hook_of(key: Any, field: str) -> str:
    """Hook of a wire key, in TransformerLens's spelling, which every card understands.

    Raises
    ------
    InvalidWire
        It is no wire key.
    """
    layer, _, kind = key.partition(":") if isinstance(key, str) else ("", "", "")
    if not (layer.isascii() and layer.isdigit()) or kind not in _NAMES:
        raise InvalidWire(field, f"unrecognised wire key {key!r}", _KEYS)
    return f"blocks.{int(layer)}.{_NAMES[kind]}"


def interventions(specs: Any, field: str = "interventions") -> list[iv.Intervention]:
    """Edits from their wire form: wire key (or hook) -> spec, or several specs in their order.

    A spec has `op`, what the op needs (`OPS`), and may have `pos` (TransformerLens's word for `positions`), `phase`,
    `where_token`, `heads`, `units`. Values are numbers, lists, arrays, arrays in wire form (`encode_array`), or
    `{"array": digest, "shape": [...]}` (`array_ref`).

    Raises
    ------
    InvalidWire
        Names the key, the op, and what is allowed. Widths, layers and positions are checked with the request.
    """
    if not isinstance(specs, Mapping):
        raise InvalidWire(field, f"got {type(specs).__name__}", "a mapping from wire key to spec")
    edits = []
    for key, given in specs.items():
        at = f"{field}[{key!r}]"
        hook = hook_of(key, at) if not isinstance(key, str) or ":" in key else key
        several = isinstance(given, (list, tuple))
        edits += [
            _edit(hook, spec, f"{at}[{i}]" if several else at) for i, spec in enumerate(given if several else [given])
        ]
    return edits


def _edit(hook: str, spec: Any, at: str) -> iv.Intervention:
    if not isinstance(spec, Mapping) or "op" not in spec:
        raise InvalidWire(at, f"got {type(spec).__name__} without 'op'", "a dict with 'op'")
    op = spec["op"]
    if not isinstance(op, str) or op not in OPS:
        raise InvalidWire(f"{at}.op", f"unsupported intervention op {op!r}", ", ".join(OPS))
    function, needed, optional = OPS[op]
    allowed = ["op", *needed, *optional, *_WHERE]
    if unknown := sorted(map(str, set(spec) - set(allowed))):
        raise InvalidWire(at, f"unknown spec key(s) {unknown} for op={op!r}", ", ".join(allowed))
    if missing := [name for name in needed if spec.get(name) is None]:
        raise InvalidWire(f"{at}.{missing[0]}", f"op={op!r} requires it")
    options = {name: spec[name] for name in optional if name in spec}
    where = {_WHERE[name]: spec[name] for name in _WHERE if spec.get(name) is not None}
    values = [_value(spec[name], f"{at}.{name}") for name in needed]
    return function(hook, *values, **options, **where)


def _value(value: Any, field: str) -> Any:
    if isinstance(value, Mapping):
        if "array" in value:
            return iv.ArrayRef(str(value["array"]), tuple(value.get("shape", ())))
        return decode_array(value, field)
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy or torch is a number
        return value.item()
    return value


def array_ref(ref: iv.ArrayRef) -> dict[str, Any]:
    """Wire form of an array that the pool has (`Client.put`): of one size, however large the array is."""
    return {"array": ref.digest, "shape": list(ref.shape)}


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """An array's wire form, in JSON."""
    flat = np.ascontiguousarray(array)
    return {"data": base64.b64encode(flat.tobytes()).decode(), "dtype": flat.dtype.name, "shape": list(array.shape)}


def decode_array(entry: Mapping[str, Any], field: str = "array") -> np.ndarray:
    """The array of a wire form.

    Raises
    ------
    InvalidWire
        It is none, or holds no numbers.
    """
    try:
        dtype = np.dtype(entry["dtype"])
        if dtype.kind not in "fiu":
            raise TypeError(f"dtype {dtype}")
        return np.frombuffer(base64.b64decode(entry["data"]), dtype).reshape(entry["shape"]).copy()
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidWire(field, f"is no array: {error}", "data (base64), dtype, shape") from None


def served_kinds(keys: Iterable[str]) -> frozenset[str]:
    """Kinds among wire keys."""
    return frozenset(key.partition(":")[2] for key in keys)
