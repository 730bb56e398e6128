"""Hook names: the vocabulary, its aliases and short forms, and their resolution against a model's card.

Canonical names stand in `lenspool.vocabulary`; `{layer}` stands for a block index. Which of them a model serves, and
how wide they are, is said by its card (`lenspool.card`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

from lenspool.errors import InvalidJob, UnknownHook, UnsupportedHook
from lenspool.vocabulary import HOOK_POINTS

if TYPE_CHECKING:
    from lenspool.card import ModelCard

VOCABULARY: tuple[str, ...] = tuple(point.name for point in HOOK_POINTS)
"""Every hook of the vocabulary, in network order."""

ALIASES: dict[str, str] = {alias: point.name for point in HOOK_POINTS for alias in point.aliases}
"""Other names of a hook: TransformerLens 3's bridge names, and short forms. Where a model serves a hook of an alias's
own name, the name means that hook.
"""

_LAYER = re.compile(r"(?<=\.)(-?\d+)(?=\.|$)")


def template(name: str) -> str:
    """Replace the layer number of a hook name: `blocks.5.hook_mlp_out -> blocks.{layer}.hook_mlp_out`."""
    return _LAYER.sub("{layer}", name, count=1)


def network_order(name: str, layers: int) -> tuple[int, int]:
    """Sort key that puts canonical names in the order in which the network computes them."""
    match = _LAYER.search(name)
    place = VOCABULARY.index(template(name))
    if match:
        return int(match.group()), place
    return (-1 if place < VOCABULARY.index("blocks.{layer}.hook_resid_pre") else layers), place


@lru_cache(maxsize=64)
def _names_and_aliases(hooks: tuple[str, ...]) -> dict[str, str]:
    """Every accepted spelling -> canonical name, for the hooks a card serves."""
    table = {name: name for name in hooks}
    templates = {template(name) for name in hooks}
    for alias, target in ALIASES.items():
        if target not in templates:
            continue
        for name in hooks:
            if template(name) == target:
                layer = _LAYER.search(name)
                table.setdefault(alias.replace("{layer}", layer.group() if layer else ""), name)
    return table


def _from_the_end(name: str, layers: int) -> str:
    """Turn a negative layer into its positive one: `resid_post.-1 -> resid_post.29`."""
    return _LAYER.sub(lambda m: str(int(m.group()) + layers) if m.group().startswith("-") else m.group(), name, count=1)


def resolve(patterns: str | Iterable[str], card: ModelCard, field: str = "hooks") -> list[str]:
    """Expand names, aliases, short forms and globs to the canonical names that the model serves.

    Parameters
    ----------
    patterns
        One name or several, in any spelling: `"blocks.5.hook_resid_post"`, `"resid_post.5"`, `"resid_post.-1"`,
        `"blocks.*.hook_mlp_out"`.
    card
        The model's card.
    field
        How errors call the argument.

    Returns
    -------
    list[str]
        Without repeats, in network order.

    Raises
    ------
    UnknownHook
        A name is not in the vocabulary, or a pattern matches nothing.
    UnsupportedHook
        A name is in the vocabulary, but this model's worker does not serve it.
    InvalidJob
        Not a string or a collection of strings, or no hook at all.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    try:
        wanted: Sequence[str] = list(patterns)
    except TypeError:
        raise InvalidJob(field, f"got {type(patterns).__name__}", "a hook name or a list of hook names") from None
    table = _names_and_aliases(tuple(card.hooks))
    found: dict[str, None] = {}
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise InvalidJob(field, f"got {pattern!r}", "hook names are strings")
        name = _from_the_end(pattern, card.n_layers)
        if name in table:
            found[table[name]] = None
        elif any(c in name for c in "*?["):
            matches = [table[spelling] for spelling in table if fnmatchcase(spelling, name)]
            if not matches:
                raise _refusal(pattern, name, table, card, field)
            found.update(dict.fromkeys(matches))
        else:
            raise _refusal(pattern, name, table, card, field)
    return sorted(found, key=lambda n: network_order(n, card.n_layers))


def _refusal(pattern: str, name: str, table: dict[str, str], card: ModelCard, field: str) -> InvalidJob:
    """The error for a name that the card does not have: out of layers, known but not served, or unknown."""
    layer = _LAYER.search(name)
    form = ALIASES.get(template(name), template(name))
    if layer and int(layer.group()) not in range(card.n_layers) and form in VOCABULARY:
        return UnsupportedHook(pattern, f"{card.name} has {card.n_layers} layers (0..{card.n_layers - 1})", field=field)
    known = any(fnmatchcase(v.replace("{layer}", "0"), name) for v in (*VOCABULARY, *ALIASES)) or form in VOCABULARY
    if known:
        return UnsupportedHook(
            pattern, card.refusals.get(form, f"the worker of {card.name} does not serve it"), field=field
        )
    return UnknownHook(pattern, difflib.get_close_matches(name, list(table), n=3, cutoff=0.5), field=field)
