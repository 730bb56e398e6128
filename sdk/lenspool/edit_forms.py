"""Edits as a job document writes them: one op at one hook, and which fields each op has.

::

    {"hook": "blocks.5.hook_resid_post", "op": "add", "ranges": [[3, 7], [9, null]], "coefficient": 2.0,
     "value": {"array": "<digest>"}, "columns": [[128, 192]], "tokens": [11]}

`value` is a number, an array by its digest (float32, one row), or with `"rows": [[a, b], ...]` rows of an array, one
for each position in turn. `columns` are the parts of the row that are edited, in place of all; an array is as wide as
they are, or as the hook, and then only those parts of it are taken. `tokens`: only where one of these stands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lenspool.card import HookInfo
from lenspool.errors import InvalidJob, UnknownHook, UnsupportedHook
from lenspool.positions import check_ranges
from lenspool_cache import ranges as rg

_DIGEST = re.compile("[0-9a-f]{64}")
_COMMON = {"hook", "op", "ranges"}
_OPTIONAL = {"columns", "tokens"}


@dataclass(frozen=True)
class Form:
    """Fields of an op's document.

    Attributes
    ----------
    numbers
        Finite floats.
    bounds
        Finite floats or null, of which at least one is a float.
    value
        What `value` may be: anything (`"any"`), an array of one row, `[k, width]` directions, or nothing.
    norm
        Whether there is `norm`, `"preserve"` or `"match"`.
    """

    numbers: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    value: Literal["any", "row", "directions"] | None = None
    norm: bool = False

    @property
    def fields(self) -> set[str]:
        """Names of the fields that the op has beside the common ones."""
        return {
            *self.numbers,
            *self.bounds,
            *(["value"] if self.value else []),
            *(["norm"] if self.norm else []),
        }


FORMS: dict[str, Form] = {
    "zero": Form(),
    "scale": Form(("factor",)),
    "add": Form(("coefficient",), value="any"),
    "set": Form(value="any"),
    "interpolate": Form(("alpha",), value="any"),
    "steer": Form(("coefficient",), value="row", norm=True),
    "project_out": Form(("coefficient",), value="directions"),
    "clamp": Form(bounds=("min", "max"), value="row"),
}
NORMS = ("preserve", "match")


def array_of(document: Mapping[str, Any]) -> str | None:
    """Digest of the array that an edit needs."""
    value = document.get("value")
    return value["array"] if isinstance(value, dict) else None


def check_edits(documents: Any, hooks: Mapping[str, HookInfo], end: int, *, generating: bool) -> None:
    """Check edits as strictly as if a stranger had written them.

    Parameters
    ----------
    end
        Number of positions that the run may have.

    Raises
    ------
    InvalidJob
        Or a subclass, naming the field and the hook.
    """
    if not isinstance(documents, list):
        raise InvalidJob("interventions", "not a list")
    for i, document in enumerate(documents):
        _check(document, hooks, end, f"interventions[{i}]", generating=generating)


def _check(document: Any, hooks: Mapping[str, HookInfo], end: int, at: str, *, generating: bool) -> None:
    if not isinstance(document, dict) or not isinstance(document.get("op"), str) or document["op"] not in FORMS:
        raise InvalidJob(f"{at}.op", f"got {document!r:.200}", ", ".join(FORMS))
    form = FORMS[document["op"]]
    if set(document) - _OPTIONAL != _COMMON | form.fields:
        allowed = ", ".join(sorted(_COMMON | form.fields | _OPTIONAL))
        raise InvalidJob(at, f"{document['op']} has the fields {sorted(document)}", allowed)
    name = document["hook"]
    if not isinstance(name, str) or name not in hooks:
        raise UnknownHook(str(name), field=f"{at}.hook")
    hook = hooks[name]
    if not hook.editable:
        raise UnsupportedHook(name, "it can be captured but not edited", field=f"{at}.hook")
    check_ranges(document["ranges"], f"{at}.ranges", end, may_be_open=generating)
    if "columns" in document:
        check_ranges(document["columns"], f"{at}.columns", hook.width, may_be_open=False)
    if "tokens" in document:
        tokens = document["tokens"]
        if not isinstance(tokens, list) or not tokens or any(type(t) is not int or t < 0 for t in tokens):
            raise InvalidJob(f"{at}.tokens", f"got {tokens!r}", "token ids")
    for field in form.numbers:
        _check_number(document[field], f"{at}.{field}", name)
    for field in (field for field in form.bounds if document[field] is not None):
        _check_number(document[field], f"{at}.{field}", name)
    if form.bounds and not any(document[field] is not None for field in form.bounds):
        raise InvalidJob(at, f"no bound at {name}", " or ".join(form.bounds))
    if form.norm and document["norm"] not in NORMS:
        raise InvalidJob(f"{at}.norm", f"got {document['norm']!r}", ", ".join(NORMS))
    if form.value is not None:
        _check_value(document, form, name, f"{at}.value")


def _check_number(value: Any, field: str, hook: str) -> None:
    if type(value) is not float or not math.isfinite(value):
        raise InvalidJob(field, f"got {value!r} at {hook}", "a finite float")


def _check_value(document: Mapping[str, Any], form: Form, hook: str, field: str) -> None:
    value = document["value"]
    if not isinstance(value, dict):
        if form.value != "any":
            raise InvalidJob(field, f"got {value!r} at {hook}", "an array")
        _check_number(value, field, hook)
        return
    digest = value.get("array")
    if not {"array"} <= set(value) <= {"array", "rows"} or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidJob(field, f"got {value!r:.200}", 'a number or {"array": <64 hex digits>}')
    if "rows" not in value:
        return
    rows = value["rows"]
    if form.value != "any" or "tokens" in document or document["ranges"][-1][1] is None:
        raise InvalidJob(
            field, f"a row per position at {hook}", "one row for all positions, as there is no fixed count"
        )
    pairs = isinstance(rows, list) and all(isinstance(r, list) and len(r) == 2 for r in rows)
    if not pairs or not all(type(a) is type(b) is int and 0 <= a < b for a, b in rows):
        raise InvalidJob(f"{field}.rows", f"got {rows!r:.200}", "[start, stop) pairs of ints")
    if rg.count(rows) != rg.count(document["ranges"]):
        count = rg.count(document["ranges"])
        raise InvalidJob(f"{field}.rows", f"has {rg.count(rows)} rows at {hook}", f"{count}, one for each position")


def check_array(document: Mapping[str, Any], hook: HookInfo, shape: Sequence[int], field: str) -> None:
    """Refuse an edit's array that does not fit.

    Raises
    ------
    InvalidJob
        Naming the hook and the shapes that fit.
    """
    widths = {hook.width}
    if "columns" in document:
        widths = {rg.count(document["columns"]), *(() if document["op"] == "project_out" else (hook.width,))}
    value = document["value"]
    many = "rows" in value or (FORMS[document["op"]].value == "directions" and len(shape) > 1)
    row = tuple(shape[1:] if many else shape)
    heads = len(row) == 2 and len(hook.dims) == 2 and row[1] == hook.dims[1]
    fits = (len(row) == 1 or heads) and math.prod(row) in widths
    if fits and "rows" in value:
        fits = max(stop for _, stop in value["rows"]) <= shape[0]
    elif fits and many:
        fits = 1 <= shape[0] <= math.prod(row)
    if not fits:
        lead = "" if not many else f"{max(s for _, s in value['rows'])}.., " if "rows" in value else "k, "
        allowed = " or ".join(f"[{lead}{width}]" for width in sorted(widths))
        raise InvalidJob(field, f"an array of shape {tuple(shape)} at {hook.name}", allowed)
