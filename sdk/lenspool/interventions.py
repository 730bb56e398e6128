"""Interventions: edits of activations, as data.

A closed vocabulary: `zero`, `scale`, `add`, `set_`. Each names a hook (or a pattern of hooks), positions and a phase.
The engine does the arithmetic in float32 on the selected rows and casts back once; `zero` and `set_` assign, so that a
NaN underneath does not survive. Several interventions at one hook apply in the order given. Captures show the edited
value.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lenspool import hooks as hk
from lenspool import positions as ps
from lenspool.card import HookInfo, ModelCard
from lenspool.errors import InvalidJob, UnsupportedHook
from lenspool_cache.keys import array_digest
from lenspool_cache.ranges import OpenRange

OPS = ("zero", "scale", "add", "set")


@dataclass(frozen=True)
class ArrayRef:
    """An array that the pool already has, by content hash; made by `Client.put`."""

    digest: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Intervention:
    """One edit. Make it with `zero`, `scale`, `add` or `set_`.

    Attributes
    ----------
    op
        `"zero"`, `"scale"`, `"add"` or `"set"`.
    hook
        Name, alias, short form or glob.
    value
        `scale`: the factor. `add`, `set`: a number, an array of shape `[width]` or of the
        hook's own shape (`[head, d_head]`), or an `ArrayRef`. `zero`: None.
    coefficient
        `add` multiplies its value by it.
    positions, phase
        Which tokens are edited; see `lenspool.positions`.
    """

    op: str
    hook: str
    value: Any = None
    coefficient: float = 1.0
    positions: Any = "all"
    phase: str = "all"


def zero(hook: str, *, positions: Any = "all", phase: str = "all") -> Intervention:
    """Set the selected rows to zero."""
    return Intervention("zero", hook, positions=positions, phase=phase)


def scale(hook: str, factor: float, *, positions: Any = "all", phase: str = "all") -> Intervention:
    """Multiply the selected rows by `factor`."""
    return Intervention("scale", hook, factor, positions=positions, phase=phase)


def add(hook: str, value: Any, *, coefficient: float = 1.0, positions: Any = "all", phase: str = "all") -> Intervention:
    """Add `coefficient * value` to the selected rows; `value` is a number or has shape `[width]`."""
    return Intervention("add", hook, value, coefficient, positions=positions, phase=phase)


def set_(hook: str, value: Any, *, positions: Any = "all", phase: str = "all") -> Intervention:
    """Replace the selected rows by `value`, a number or an array of shape `[width]`."""
    return Intervention("set", hook, value, positions=positions, phase=phase)


def as_float32(value: Any, field: str) -> np.ndarray:
    """Turn an array-like (numpy, torch, list) into a finite, C-ordered float32 array without negative zeros.

    Raises
    ------
    InvalidJob
        Not numeric, or not finite in float32.
    """
    if hasattr(value, "detach"):  # torch, without importing it; bfloat16 has no numpy form
        value = value.detach().float().cpu().numpy()
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value).astype(np.float32)
    except (TypeError, ValueError):
        raise InvalidJob(field, f"cannot be read as an array of numbers: {type(value).__name__}") from None
    if not np.isfinite(array).all():
        raise InvalidJob(field, "holds NaN or Infinity (in float32)", "finite numbers")
    return np.ascontiguousarray(array) + np.float32(0.0)


def _number(value: Any, field: str) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise InvalidJob(field, f"got {value!r}", "a number")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidJob(field, f"got {number}", "a finite number")
    return number + 0.0


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (numbers.Real, np.bool_, str)) or getattr(value, "ndim", None) == 0


def to_documents(
    interventions: Intervention | Iterable[Intervention],
    card: ModelCard,
    n_prompt: int,
    *,
    generating: bool,
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Check interventions against a card and a prompt, and write them in canonical form.

    Equal meaning gives equal documents: patterns are expanded, positions become ranges, numbers floats, arrays digests.

    Returns
    -------
    documents
        One JSON object per (intervention, hook), in the order given.
    arrays
        Digest -> float32 `[width]`, for those given by value.

    Raises
    ------
    InvalidJob
        Or a subclass; names `interventions[i].field`.
    """
    if isinstance(interventions, Intervention):
        interventions = [interventions]
    documents: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for i, item in enumerate(interventions):
        at = f"interventions[{i}]"
        if not isinstance(item, Intervention):
            raise InvalidJob(at, f"got {type(item).__name__}", "lenspool.zero, scale, add or set_")
        if item.op not in OPS:
            raise InvalidJob(f"{at}.op", f"got {item.op!r}", ", ".join(OPS))
        names = hk.resolve(item.hook, card, f"{at}.hook")
        selected = ps.resolve(item.positions, n_prompt, generating=generating, field=f"{at}.positions")
        selected = ps.in_phase(selected, item.phase, n_prompt, field=f"{at}.phase")
        for name in names:
            if not card.hooks[name].editable:
                raise UnsupportedHook(name, "it can be captured but not edited", field=f"{at}.hook")
            documents.append(_document(item, card.hooks[name], selected, arrays, at))
    return documents, arrays


def _document(
    item: Intervention, hook: HookInfo, selected: list[OpenRange], arrays: dict[str, np.ndarray], at: str
) -> dict[str, Any]:
    document: dict[str, Any] = {"hook": hook.name, "op": item.op, "ranges": [list(r) for r in selected]}
    if item.op == "scale":
        document["factor"] = _number(item.value, f"{at}.factor")
    if item.op == "add":
        document["coefficient"] = _number(item.coefficient, f"{at}.coefficient")
    if item.op in ("add", "set"):
        document["value"] = _value(item.value, hook, arrays, f"{at}.value")
    return document


def _value(value: Any, hook: HookInfo, arrays: dict[str, np.ndarray], field: str) -> float | dict[str, str]:
    if not isinstance(value, ArrayRef) and _is_number(value):
        return _number(value.item() if hasattr(value, "item") else value, field)
    shapes = dict.fromkeys([(hook.width,), hook.dims or (hook.width,)])
    shape = tuple(value.shape) if isinstance(value, ArrayRef) else None
    if shape is None:
        array = as_float32(value, field)
        shape = array.shape
    if shape not in shapes:
        expected = " or ".join(map(str, shapes))
        raise InvalidJob(field, f"has shape {shape}", f"a number or shape {expected}, as {hook.name} has")
    if isinstance(value, ArrayRef):
        return {"array": value.digest}
    array = array.reshape(-1)
    digest = array_digest(array)
    arrays[digest] = array
    return {"array": digest}
