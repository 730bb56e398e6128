"""From interventions as people write them to the documents that a job carries (`lenspool.edit_forms`).

Equal meaning gives equal documents: patterns are expanded, positions become ranges, heads and units columns, numbers
floats, and documents stand in network order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lenspool import hooks as hk
from lenspool.card import HookInfo, ModelCard
from lenspool.edit_forms import FORMS, NORMS
from lenspool.edit_places import Columns, Selection, columns_of, select
from lenspool.edit_values import Values
from lenspool.errors import InvalidJob, UnsupportedHook
from lenspool.interventions import Intervention, Where, as_number

Document = dict[str, Any]


def to_documents(
    interventions: Intervention | Iterable[Intervention],
    card: ModelCard,
    tokens: Sequence[int],
    *,
    generating: bool,
    norms: Mapping[str, float] | None = None,
) -> tuple[list[Document], dict[str, np.ndarray]]:
    """Check interventions against a card and a prompt, and write them in canonical form.

    Parameters
    ----------
    tokens
        The prompt.
    norms
        Hook -> mean norm of its rows, for those with `relative`.

    Returns
    -------
    documents
        One JSON object per (intervention, hook), in network order; at one hook in the order given.
    arrays
        Digest -> float32 array, for those given by value.

    Raises
    ------
    InvalidJob
        Or a subclass; names `interventions[i].field`.
    """
    if isinstance(interventions, Intervention):
        interventions = [interventions]
    writer = _Writer(card, tokens, norms or {}, generating=generating)
    written: list[Document] = []
    for i, item in enumerate(interventions):
        at = f"interventions[{i}]"
        if not isinstance(item, Intervention):
            raise InvalidJob(at, f"got {type(item).__name__}", "lenspool.add, scale, zero, set_, patch, steer, ...")
        written += writer.write(item, at)
    written.sort(key=lambda document: hk.network_order(document["hook"], card.n_layers))
    return written, writer.arrays


class _Writer:
    def __init__(self, card: ModelCard, tokens: Sequence[int], norms: Mapping[str, float], *, generating: bool) -> None:
        self._card = card
        self._tokens = tokens
        self._norms = norms
        self._generating = generating
        self.arrays: dict[str, np.ndarray] = {}

    def write(self, item: Intervention, at: str) -> list[Document]:
        """Documents of one intervention."""
        allowed = [*FORMS, "patch"]
        if item.op not in allowed:
            raise InvalidJob(f"{at}.op", f"got {item.op!r}", ", ".join(allowed))
        if unknown := set(item.where) - set(Where.__annotations__):
            raise InvalidJob(at, f"unknown words {sorted(unknown)}", ", ".join(Where.__annotations__))
        selection = select(item.where, self._tokens, self._card.vocab_size, at, generating=self._generating)
        documents = []
        for name in hk.resolve(item.hook, self._card, f"{at}.hook"):
            hook = self._hook(name, item.op, at)
            columns = columns_of(item.where, hook, at)
            documents += self._documents(item, hook, selection, columns, at)
        return documents

    def _hook(self, name: str, op: str, at: str) -> HookInfo:
        """The hook that is edited for a name; what a head adds to the stream is zeroed and scaled where it is made."""
        hook = self._card.hooks[name]
        if hook.editable:
            return hook
        made_of = self._card.hooks.get(name.removesuffix("hook_result") + "hook_z")
        if name.endswith(".attn.hook_result") and made_of is not None and made_of.editable:
            if op in ("zero", "scale"):
                return made_of
            reason = "only zero and scale can be done to it; hook_attn_out takes every edit"
            raise UnsupportedHook(name, reason, field=f"{at}.hook")
        raise UnsupportedHook(name, "it can be captured but not edited", field=f"{at}.hook")

    def _documents(
        self, item: Intervention, hook: HookInfo, selection: Selection, columns: Columns | None, at: str
    ) -> list[Document]:
        values = Values(hook, selection, self.arrays, at)
        op, options = item.op, item.options
        document: Document = {"hook": hook.name, "op": op, "ranges": [list(r) for r in selection.ranges]}
        if selection.tokens is not None:
            document["tokens"] = selection.tokens
        if op == "scale":
            document["factor"] = as_number(options.get("factor"), f"{at}.factor")
        if op == "project_out":
            document["coefficient"] = as_number(options.get("coefficient", 1.0), f"{at}.coefficient")
        if op == "steer":
            if options.get("norm", "preserve") is None:
                document["op"] = op = "add"
            else:
                document["norm"] = self._norm(options, f"{at}.norm")
        if op in ("add", "steer"):
            document["coefficient"] = self._coefficient(item, hook, at)
        if op == "clamp":
            document |= self._bounds(options, at)
        if op == "interpolate":
            document["alpha"] = as_number(options.get("alpha"), f"{at}.alpha")
            if document["alpha"] == 1.0:  # assigned, so that nothing of a NaN underneath is left
                document = {k: v for k, v in document.items() if k != "alpha"} | {"op": "set"}
                op = "set"
        if op == "patch":
            document["op"] = "set"
            document["value"] = values.patch(item.value, options.get("source_positions"), columns)
        elif FORMS[op].value == "any":
            document["value"] = values.any(item.value, columns)
        elif FORMS[op].value is not None:
            needs_length = op == "clamp" or document.get("norm") == "match"
            if columns is not None and columns.head_size is not None:
                heads = values.per_head(item.value, FORMS[op].value == "directions", columns, length=needs_length)
                return [{**document, "columns": [part], "value": value} for part, value in heads]
            document["value"] = values.rows(item.value, FORMS[op].value == "directions", columns, length=needs_length)
        if columns is not None:
            document["columns"] = columns.parts
        return [document]

    def _norm(self, options: Mapping[str, Any], field: str) -> str:
        norm = options.get("norm", "preserve")
        if norm not in NORMS:
            raise InvalidJob(field, f"got {norm!r}", '"preserve", "match" or None')
        if norm == "match" and options.get("relative") is not None:
            raise InvalidJob(field, '"match" together with relative', "coefficient, which is relative to each row")
        return str(norm)

    def _bounds(self, options: Mapping[str, Any], at: str) -> dict[str, float | None]:
        bounds = {
            name: None if options.get(name) is None else as_number(options[name], f"{at}.{name}")
            for name in ("min", "max")
        }
        low, high = bounds["min"], bounds["max"]
        if low is None and high is None:
            raise InvalidJob(f"{at}.min", "neither min nor max was given", "at least one of them")
        if low is not None and high is not None and low > high:
            raise InvalidJob(f"{at}.min", f"{low} is greater than max, {high}", "min <= max")
        return bounds

    def _coefficient(self, item: Intervention, hook: HookInfo, at: str) -> float:
        relative = item.options.get("relative")
        coefficient = as_number(item.options.get("coefficient", 1.0), f"{at}.coefficient")
        if relative is None:
            return coefficient
        if coefficient != 1.0 or "heads" in item.where or "units" in item.where:
            raise InvalidJob(
                f"{at}.relative", "was given together with coefficient, heads or units", "only one of them"
            )
        number = as_number(relative, f"{at}.relative")
        if hook.name not in self._norms:
            raise InvalidJob(f"{at}.relative", f"the norm at {hook.name} is not known", "a call of Client")
        return number * self._norms[hook.name] / Values.length(item.value, hook.width, f"{at}.relative")
