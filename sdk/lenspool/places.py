"""A prompt's tokens to look at, and positions by the text that stands there: `positions=at("Paris")`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lenspool.errors import InvalidJob
from lenspool.interventions import Intervention, listed
from lenspool.tokenizer import Tokenizer

_CHARACTER_TOKENS = 8
"""Tokens that one character has at most: what decoding must look back for."""


@dataclass(frozen=True)
class At:
    """Positions of all tokens that overlap an occurrence of a text in the prompt. Made by `at`."""

    text: str
    occurrence: int = 0

    def find(self, tokens: Sequence[int], tokenizer: Tokenizer, field: str = "positions") -> list[int]:
        """The positions in a prompt, ascending.

        Raises
        ------
        InvalidJob
            The prompt has no such occurrence.
        """
        if not isinstance(self.text, str) or not self.text:
            raise InvalidJob(field, f"at({self.text!r})", "at(text) with a text that is not empty")
        if type(self.occurrence) is not int:
            raise InvalidJob(field, f"occurrence is {self.occurrence!r}", "an int, negative from the last")
        prompt, spans = decoded(tokens, tokenizer)
        starts = []
        start = prompt.find(self.text)
        while start >= 0:
            starts.append(start)
            start = prompt.find(self.text, start + len(self.text))
        if not starts:
            shown = repr(prompt) if len(prompt) <= 200 else f"{prompt[:200]!r}..."
            raise InvalidJob(field, f"{self.text!r} is not in the prompt", f"a part of {shown}")
        if not -len(starts) <= self.occurrence < len(starts):
            allowed = f"{-len(starts)}..{len(starts) - 1}"
            raise InvalidJob(field, f"{self.text!r} has no occurrence {self.occurrence}", allowed)
        begin = starts[self.occurrence]
        end = begin + len(self.text)
        return [p for p, (start, stop) in enumerate(spans) if start < end and stop > begin]


def at(text: str, occurrence: int = 0) -> At:
    """Positions by a part of the prompt's text, wherever `positions=` is taken: in calls and in interventions.

    Parameters
    ----------
    text
        What stands there, in the prompt as its tokens decode: a chat with its template, special tokens included.
    occurrence
        Which, from 0, where it stands there several times without overlap; negative: from the last.

    Returns
    -------
    At
        All token positions that overlap it; a list may hold it together with ints.
    """
    return At(text, occurrence)


def decoded(tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """Text of token ids, special tokens included, and the `[start, stop)` characters that each token has a part in.

    A character whose bytes are several tokens' belongs to each of them.
    """
    text: list[str] = []
    spans = []
    for i in range(len(tokens)):
        before = tokenizer.text(tokens[max(0, i - _CHARACTER_TOKENS) : i])
        after = tokenizer.text(tokens[max(0, i - _CHARACTER_TOKENS) : i + 1])
        same = next((k for k, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        same = min(same, len(after))
        if before == after and after.endswith("\ufffd"):  # one more part of a character that is not complete
            same -= 1
        start = len(text) - (len(before) - same)
        text[start:] = after[same:]
        spans.append((start, len(text)))
    return "".join(text), spans


def located(
    positions: Any,
    interventions: Intervention | Iterable[Intervention] | None,
    tokens: Sequence[int],
    tokenizer: Tokenizer | None,
) -> tuple[Any, list[Intervention]]:
    """Positions and interventions with numbers in place of `at`.

    Raises
    ------
    InvalidJob
        A text is not in the prompt, or there is no tokenizer.
    """
    items = listed(interventions)
    out = []
    for i, item in enumerate(items):
        if isinstance(item, Intervention):
            where = dict(item.where)
            if "positions" in where:
                where["positions"] = _numbers(where["positions"], tokens, tokenizer, f"interventions[{i}].positions")
            options = {
                name: _numbers(value, tokens, tokenizer, f"interventions[{i}].{name}") if name in ("i", "j") else value
                for name, value in item.options.items()
            }
            item = replace(item, where=where, options=options)  # type: ignore[arg-type]
        out.append(item)
    return _numbers(positions, tokens, tokenizer, "positions"), out


def _numbers(positions: Any, tokens: Sequence[int], tokenizer: Tokenizer | None, field: str) -> Any:
    several = isinstance(positions, (list, tuple))
    items = positions if several else [positions]
    if not any(isinstance(item, At) for item in items):
        return positions
    if tokenizer is None:
        raise InvalidJob(field, "at(...) needs the model's tokenizer, which it was served without", "ints")
    out: list[Any] = []
    for item in items:
        out += item.find(tokens, tokenizer, field) if isinstance(item, At) else [item]
    return out


@dataclass(frozen=True, repr=False)
class Tokens:
    """The tokens of a prompt; iterates as `(position, id, text)`, shows itself as a table.

    Attributes
    ----------
    ids
        Token ids.
    strings
        Text of each by itself; None when the model has no tokenizer.
    """

    ids: list[int]
    strings: list[str] | None
    tokenizer: Tokenizer | None

    @property
    def positions(self) -> list[int]:
        """0, 1, ..."""
        return list(range(len(self.ids)))

    def at(self, text: str, occurrence: int = 0) -> list[int]:
        """The positions that `lenspool.at` stands for in this prompt.

        Raises
        ------
        InvalidJob
            The text is not in the prompt, or there is no tokenizer.
        """
        found: list[int] = _numbers([At(text, occurrence)], self.ids, self.tokenizer, "at")
        return found

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, int, str | None]]:
        for position, token in enumerate(self.ids):
            yield position, token, None if self.strings is None else self.strings[position]

    def __repr__(self) -> str:
        rows = [f"{p:>5} {i:>7}  {'' if s is None else repr(s)}".rstrip() for p, i, s in self]
        return "\n".join([f"<Tokens {len(self)}", *rows]) + ">"

    def _repr_html_(self) -> str:
        cells = [
            f"<tr><td>{p}</td><td>{i}</td><td><code>{html.escape('' if s is None else repr(s))}</code></td></tr>"
            for p, i, s in self
        ]
        return f"<table><tr><th>position</th><th>id</th><th>token</th></tr>{''.join(cells)}</table>"
