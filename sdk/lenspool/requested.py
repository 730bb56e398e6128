"""What a call asks for: hook names and readouts, as the names under which their rows are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lenspool import entries
from lenspool import hooks as hk
from lenspool.card import ModelCard
from lenspool.entries import OPS, Entry
from lenspool.errors import InvalidJob
from lenspool.readouts import Readout, from_text
from lenspool_cache.ranges import OpenRange


def resolve(
    hooks: Any, card: ModelCard, ranges: Sequence[OpenRange], n_prompt: int, end: int, *, generating: bool
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Resolve what a call asks for: hook names, readouts, names of readouts.

    Parameters
    ----------
    ranges
        The call's positions.
    end
        Number of positions of the run, at most.

    Returns
    -------
    names
        Hooks in network order, then the readouts' stored entries, without repeats.
    arrays
        Digest -> array of the readouts' arguments.

    Raises
    ------
    InvalidJob
        Or a subclass.
    """
    if isinstance(hooks, (str, Readout)):
        hooks = [hooks]
    try:
        asked = list(hooks)
    except TypeError:
        raise InvalidJob("hooks", f"got {type(hooks).__name__}", "hook names and readouts") from None
    plain: list[Any] = []
    found: dict[str, Entry] = {}
    arrays: dict[str, np.ndarray] = {}
    for item in asked:
        if isinstance(item, str) and entries.is_readout(item):
            item = from_text(item)
        if not isinstance(item, Readout):
            plain.append(item)
            continue
        for entry in _entries(item, card, ranges):
            entries.check(entry, card, "hooks", end, generating=generating)
            _check_shapes(item, entry, card)
            if not entry.rows(ranges, n_prompt):
                raise InvalidJob("positions", "no selected position has a next prompt token", "others, for a loss")
            found |= {stored.name: stored for stored in entry.stored}
        arrays |= item.arrays
    in_order = sorted(found, key=lambda name: (hk.network_order(found[name].hook, card.n_layers), name))
    return [*hk.resolve(plain, card), *in_order], arrays


def _entries(item: Readout, card: ModelCard, ranges: Sequence[OpenRange]) -> list[Entry]:
    args = item.args
    if OPS[item.op].reduces and not args:
        args = (tuple(tuple(r) for r in ranges),)
    return [Entry(name, item.op, args, item.lens) for name in hk.resolve(item.hook, card)]


def _check_shapes(item: Readout, entry: Entry, card: ModelCard) -> None:
    for name, shape in entry.shapes(entries.width_read(entry, card)).items():
        if item.shapes.get(name, shape) != shape:
            raise InvalidJob(f"{entry.op}.{name}", f"has shape {item.shapes[name]}", f"{shape} for {entry.hook}")
