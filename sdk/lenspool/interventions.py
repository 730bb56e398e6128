"""Interventions: edits of activations, as data.

>>> await client.capture(prompt, "resid_post.*", interventions=[  # doctest: +SKIP
...     steer("resid_post.12", vector, coefficient=4.0),
...     zero("blocks.5.attn.hook_z", heads=[2, 7], positions="last"),
...     patch("resid_pre.3", clean, positions=[4, 5]),
... ])

A closed vocabulary; each names a hook (or a pattern of hooks) and takes the same words for where it applies (`Where`).
The engine does the arithmetic in float32 on the selected rows and casts back once; `zero`, `set_`, `patch` and
`mean_ablate` assign, so that a NaN underneath does not survive. Interventions apply in network order; several at one
hook in the order given. Captures show the edited value.

A row `x` is what one position has at the hook, `[width]`; of a hook with heads all of them in one row, or with `heads`
those of one head at a time.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from lenspool.errors import InvalidJob


@dataclass(frozen=True)
class ArrayRef:
    """An array that the pool already has, by content hash; made by `Client.put`."""

    digest: str
    shape: tuple[int, ...]


class Where(TypedDict, total=False):
    """Where an intervention applies; every one takes these keywords.

    Attributes
    ----------
    positions
        Which tokens: see `lenspool.positions`; default `"all"`.
    phase
        Of these, those in the `"prompt"` (prefill), those `"generated"` (decode), or `"all"`.
    where_token
        Of these, those at which one of these token ids stands, in the prompt and in what is generated.
    heads
        Heads of a hook with heads (`attn.hook_q|k|v|z|result`), the others are left alone. Values then have the shape
        `[d_head]` (for each head) or `[heads, d_head]`.
    units
        Numbers within the row, e.g. neurons of `mlp.hook_post`; values then have the shape `[units]`.
    """

    positions: Any
    phase: str
    where_token: int | Iterable[int]
    heads: int | Iterable[int]
    units: int | Iterable[int]


@dataclass(frozen=True, eq=False)
class Intervention:
    """One edit. Make it with the functions of this module.

    Attributes
    ----------
    op
        Name of the function that made it.
    hook
        Name, alias, short form or glob.
    value
        Number, array-like, `ArrayRef`, or for `patch` a `Capture`; None where the op takes none.
    options
        The op's other arguments.
    where
        See `Where`.
    """

    op: str
    hook: str
    value: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    where: Where = field(default_factory=Where)

    def __repr__(self) -> str:
        value = [] if self.value is None else [_brief(self.value)]
        named = [
            f"{name}={_brief(option)}" for name, option in {**self.options, **self.where}.items() if option is not None
        ]
        return f"{self.op}({', '.join([repr(self.hook), *value, *named])})"


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"<{len(value)} items>"
    return repr(value) if not shape else f"<{type(value).__name__} {list(shape)}>"


def zero(hook: str, **where: Unpack[Where]) -> Intervention:
    """`x = 0`."""
    return Intervention("zero", hook, where=where)


suppress = zero
"""Another name of `zero`."""


def scale(hook: str, factor: float, **where: Unpack[Where]) -> Intervention:
    """`x = factor * x`."""
    return Intervention("scale", hook, options={"factor": factor}, where=where)


def add(
    hook: str, value: Any, *, coefficient: float = 1.0, relative: float | None = None, **where: Unpack[Where]
) -> Intervention:
    """`x = x + coefficient * value`.

    Parameters
    ----------
    value
        A number, `[width]`, or one row per position `[positions, width]`.
    relative
        In place of `coefficient`: what is added has this many times the mean norm of rows at the hook
        (`Client.norms`).
    """
    return Intervention("add", hook, value, {"coefficient": coefficient, "relative": relative}, where)


def set_(hook: str, value: Any, **where: Unpack[Where]) -> Intervention:
    """`x = value`: a number, `[width]`, or one row per position `[positions, width]`."""
    return Intervention("set", hook, value, where=where)


def mean_ablate(hook: str, mean: Any, **where: Unpack[Where]) -> Intervention:
    """`x = mean`, e.g. of the rows of many prompts: the same as `set_`."""
    return Intervention("set", hook, mean, where=where)


def patch(hook: str, source: Any, *, source_positions: Any = None, **where: Unpack[Where]) -> Intervention:
    """`x = source[hook]` at the same position: activation patching.

    Parameters
    ----------
    source
        A `Capture` (or `Generation`) that has the hook; or an array or `ArrayRef` `[rows, width]`.
    source_positions
        Which of the source's rows the positions take, one for each in their order: ints, or a slice. Default: of a
        capture those at the same positions; of an array its rows one after another.
    """
    return Intervention("patch", hook, source, {"source_positions": source_positions}, where)


def interpolate(hook: str, toward: Any, alpha: float, **where: Unpack[Where]) -> Intervention:
    """`x = (1 - alpha) * x + alpha * toward`; `toward` is a number, `[width]` or `[positions, width]`."""
    return Intervention("interpolate", hook, toward, {"alpha": alpha}, where)


def steer(
    hook: str,
    vector: Any,
    *,
    coefficient: float = 1.0,
    relative: float | None = None,
    norm: Literal["preserve", "match"] | None = "preserve",
    **where: Unpack[Where],
) -> Intervention:
    """Move rows along a vector `[width]`.

    Parameters
    ----------
    norm
        `"preserve"`: `y = x + coefficient * vector`, `x = y * |x| / |y|` (0 where y is 0). `"match"`:
        `x = x + coefficient * |x| * vector / |vector|`. None: the same as `add`.
    relative
        As in `add`; not with `"match"`, which is relative already.
    """
    options = {"coefficient": coefficient, "relative": relative, "norm": norm}
    return Intervention("steer", hook, vector, options, where)


def project_out(hook: str, directions: Any, *, coefficient: float = 1.0, **where: Unpack[Where]) -> Intervention:
    """`x = x - coefficient * D^T D x`: remove directions, `[width]` or `[k, width]`.

    The directions are orthonormalised (`D`, by QR in float64); 1 removes their span, 2 reflects at what is left.
    """
    return Intervention("project_out", hook, directions, {"coefficient": coefficient}, where)


def clamp(
    hook: str, direction: Any, *, min: float | None = None, max: float | None = None, **where: Unpack[Where]
) -> Intervention:
    """Bound the component along a direction `[width]`, of which only the direction counts: `d = direction /
    |direction|`, `x = x + (clip(x @ d, min, max) - x @ d) * d`. One of the bounds may be None.
    """
    return Intervention("clamp", hook, direction, {"min": min, "max": max}, where)


def swap_rows(hook: str, i: int, j: int, **where: Unpack[Where]) -> Intervention:
    """Exchange the rows of two positions of the prompt (negative: from its end).

    The rows are captured first, in a run with all interventions that come before this one, and then patched.
    """
    return Intervention("swap_rows", hook, options={"i": i, "j": j}, where=where)


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


def as_number(value: Any, field: str) -> float:
    """A finite float, without negative zero.

    Raises
    ------
    InvalidJob
        Not a number, or not finite.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise InvalidJob(field, f"got {value!r}", "a number")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidJob(field, f"got {number}", "a finite number")
    return number + 0.0


def listed(interventions: Intervention | Iterable[Intervention] | None) -> list[Intervention]:
    """The argument of a call as a list; None is none.

    Raises
    ------
    InvalidJob
        It is neither an intervention nor some of them.
    """
    if interventions is None:
        return []
    if isinstance(interventions, Intervention):
        return [interventions]
    try:
        return list(interventions)
    except TypeError:
        kind = type(interventions).__name__
        raise InvalidJob("interventions", f"got {kind}", "lenspool.add, scale, ..., or a list of them") from None
