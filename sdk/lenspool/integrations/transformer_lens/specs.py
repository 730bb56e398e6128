"""Interventions as TransformerLens writes them, `{hook: {"op": ..., ...}}`, as the pool's."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lenspool.errors import InvalidJob
from lenspool.integrations.transformer_lens.errors import BadInput, Unsupported
from lenspool.integrations.transformer_lens.norm import FinalNorm
from lenspool.integrations.transformer_lens.rows import Row
from lenspool.integrations.transformer_lens.tree import Tree
from lenspool.interventions import Intervention, add, as_float32, scale, set_, zero

_KEYS = {"suppress": set(), "scale": {"factor"}, "add": {"value"}, "set": {"value"}}
_NORMALIZED = "ln_final.hook_normalized"


class Specs:
    """Reads specifications for a model.

    Parameters
    ----------
    norm
        Gives the final norm, whose input's normalized form can be edited only with its weights.
    """

    def __init__(self, tree: Tree, norm: Any) -> None:
        self._tree = tree
        self._norm = norm

    def read(self, intervene: Any, rows: Sequence[Row]) -> list[list[Intervention]]:
        """The interventions of each row.

        Parameters
        ----------
        intervene
            A mapping from hooks to specifications, or to the pool's interventions, or lists of either; or the pool's
            interventions themselves. They hold for all rows, unless it is a list of mappings (or None), one per row.

        Raises
        ------
        BadInput, Unsupported
            A specification is wrong; names hook and key.
        """
        if intervene is None:
            return [[] for _ in rows]
        each = isinstance(intervene, (list, tuple)) and all(x is None or isinstance(x, Mapping) for x in intervene)
        if not each or not intervene:
            return [self._row(intervene, row) for row in rows]
        if len(intervene) != len(rows):
            raise BadInput("intervene", f"{len(intervene)} mappings for {len(rows)} rows", "one for all, or one each")
        return [self._row(one or {}, row) for one, row in zip(intervene, rows, strict=True)]

    def _row(self, intervene: Any, row: Row) -> list[Intervention]:
        if isinstance(intervene, Intervention):
            intervene = [intervene]
        if not isinstance(intervene, Mapping):
            items = list(intervene) if isinstance(intervene, Iterable) else [intervene]
            if all(isinstance(item, Intervention) for item in items):
                return [self._own(item.hook, item) for item in items]
            raise BadInput("intervene", f"got {intervene!r:.100}", "{hook: {'op': ...}}, or interventions of lenspool")
        out = []
        for name, specs in intervene.items():
            for spec in specs if isinstance(specs, (list, tuple)) else [specs]:
                out += [self._own(name, spec)] if isinstance(spec, Intervention) else self._edits(name, spec, row)
        return out

    def _own(self, name: str, item: Intervention) -> Intervention:
        """The pool's own intervention, at a hook that may have TransformerLens's name."""
        return replace(item, hook=self._tree.served[name]) if name in self._tree.served else replace(item, hook=name)

    def _edits(self, name: str, spec: Any, row: Row) -> list[Intervention]:
        at = f"intervene[{name!r}]"
        op = _checked(name, spec, at)
        where: dict[str, Any] = {}
        positions = _positions(spec.get("pos"), at)
        if positions is not None:
            where["positions"] = _moved(positions, row, at)
        if name == _NORMALIZED:
            return self._normalized(op, spec, where, at)
        hook = self._tree.edited(name)
        info = self._tree.card.hooks[hook]
        if not info.editable:
            raise BadInput(at, f"Cannot intervene on {name!r}: it can be captured but not edited")
        if op == "suppress":
            return [zero(hook, **where)]
        if op == "scale":
            return [scale(hook, _number(spec["factor"], f"{at}.factor"), **where)]
        value = _value(spec["value"], info.width, info.dims, positions, f"{at}.value")
        return [(add if op == "add" else set_)(hook, value, **where)]

    def _normalized(self, op: str, spec: Mapping[str, Any], where: dict[str, Any], at: str) -> list[Intervention]:
        """An edit in front of the final norm's weights, as one behind them: `out = normalized * weight + bias`."""
        norm: FinalNorm = self._norm()
        weight, bias = norm.affine()
        hook = "ln_final.hook_out"
        if op == "suppress":
            return [zero(hook, **where) if bias is None else set_(hook, bias, **where)]
        if op == "scale":
            factor = _number(spec["factor"], f"{at}.factor")
            rest = [] if bias is None else [add(hook, (1 - factor) * bias, **where)]
            return [scale(hook, factor, **where), *rest]
        value = _value(spec["value"], len(weight), (), _positions(spec.get("pos"), at), f"{at}.value")
        if op == "add":
            return [add(hook, value * weight, **where)]
        return [set_(hook, value * weight + (0 if bias is None else bias), **where)]


def _checked(name: str, spec: Any, at: str) -> str:
    """The op of a specification that has the right keys."""
    if callable(spec):
        raise Unsupported(at, "a pool takes intervention specs, not callables", f"{{'op': ...}} of {sorted(_KEYS)}")
    if not isinstance(spec, Mapping) or "op" not in spec:
        raise BadInput(at, f"must be a dict with 'op' key; got {spec!r:.100}")
    op = spec["op"]
    if not isinstance(op, str) or op not in _KEYS:
        raise BadInput(f"{at}.op", f"Unsupported intervention op {op!r}", ", ".join(sorted(_KEYS)))
    if missing := _KEYS[op] - set(spec):
        raise BadInput(at, f"op={op!r} requires {missing.pop()!r}")
    allowed = {"op", "pos"} | _KEYS[op]
    if extra := set(spec) - allowed:
        raise BadInput(at, f"unknown spec key(s) {sorted(extra)}", f"for op={op!r}: {sorted(allowed)}")
    return op


def _positions(pos: Any, at: str) -> list[int] | None:
    if pos is None:
        return None
    given = pos if isinstance(pos, (list, tuple)) else [pos]
    if not given:
        raise BadInput(f"{at}.pos", "'pos' is empty: the edit would be nowhere", "leave it out for all positions")
    if any(not isinstance(p, numbers.Integral) or isinstance(p, bool) for p in given):
        raise BadInput(f"{at}.pos", f"'pos' must be an int or list of ints; got {pos!r}")
    if negative := [int(p) for p in given if p < 0]:
        reason = f"'pos' must be non-negative; got {negative}"
        raise BadInput(f"{at}.pos", reason, "interventions of lenspool take positions from the end")
    return [int(p) for p in given]


def _moved(positions: list[int], row: Row, at: str) -> list[int]:
    """Positions in the prompt without its padding."""
    count = len(row.tokens)
    if beyond := [p for p in positions if p >= row.length]:
        reason = f"'pos' {beyond} is beyond the prompt length {row.length} (positions are 0-indexed)"
        raise BadInput(f"{at}.pos", reason)
    if outside := [p for p in positions if not row.start <= p < row.start + count]:
        reason = f"'pos' {outside} is outside the unmasked prompt positions [{row.start}, {row.start + count})"
        raise BadInput(f"{at}.pos", reason)
    return [p - row.start for p in positions]


def _number(value: Any, field: str) -> float:
    """A number, also as an array or a tensor without dimensions."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise BadInput(field, f"got {value!r}", "a finite number")
    return float(value)


def _value(value: Any, width: int, dims: tuple[int, ...], positions: list[int] | None, field: str) -> Any:
    """A number, a row of the hook's width in any shape, or a row for each position."""
    if isinstance(value, (numbers.Real, str, type(None))) or getattr(value, "ndim", None) == 0:
        return _number(value, field)
    try:
        array = as_float32(value, field)
    except InvalidJob as error:
        raise BadInput(field, error.reason, f"a number, or {width} finite numbers") from None
    if array.size == width:
        return array.reshape(-1)
    if positions is not None and array.shape in ((len(positions), width), (len(positions), *dims)):
        return array.reshape(len(positions), width)
    raise BadInput(field, f"'value' has {array.size} elements but the hook width is {width}")
