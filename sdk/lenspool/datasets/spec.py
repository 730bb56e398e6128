"""What a dataset is asked for: what its sequences and their activations follow from, beside its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lenspool import entries
from lenspool.arguments import Manner
from lenspool.card import ModelCard
from lenspool.datasets.folder import VERSION
from lenspool.datasets.packing import Packing
from lenspool.errors import InvalidJob
from lenspool.interventions import ArrayRef, Intervention, as_float32
from lenspool.readouts import Readout
from lenspool.requested import resolve
from lenspool.result import Capture
from lenspool_cache import array_digest


@dataclass(frozen=True)
class Asked:
    """What is captured of each sequence, and how the pool is asked."""

    hooks: list[str | Readout]
    positions: Any
    interventions: list[Intervention]
    how: Manner


def spec_of(card: ModelCard, asked: Asked, packing: Packing, chunk: int) -> dict[str, Any]:
    """What the sequences of a dataset and their activations follow from, beside its rows."""
    ranges = [(0, 2)]
    names, _ = resolve(asked.hooks, card, ranges, 2, 2, generating=False)
    if not names:
        raise InvalidJob("hooks", "no hook was asked for", "at least one hook name")
    return {
        "v": VERSION,
        "model": card.id,
        "hooks": list(dict.fromkeys(map(_shown, names))),
        "positions": _settled(asked.positions),
        "interventions": _settled(asked.interventions),
        "packing": vars(packing),
        "chunk": chunk,
    }


def _shown(name: str) -> str:
    """A hook or readout as it is asked for: a reduction without the positions that it is over."""
    if not entries.is_readout(name):
        return name
    entry = entries.parse(name).whole
    return entries.Entry(entry.hook, entry.op, () if entry.reduces else entry.args, entry.lens).name


def _settled(value: Any) -> Any:
    """An argument as JSON that differs where the argument does; arrays by digest."""
    if isinstance(value, Intervention):
        return [value.op, value.hook, *map(_settled, (value.value, value.options, value.where))]
    if isinstance(value, ArrayRef):
        return value.digest
    if isinstance(value, Capture):
        return value.provenance["keys"]
    if isinstance(value, Mapping):
        return {str(name): _settled(item) for name, item in value.items()}
    if getattr(value, "shape", ()):
        return array_digest(as_float32(value, "interventions"))
    if isinstance(value, (list, tuple)):
        return [_settled(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float)) else repr(value)
