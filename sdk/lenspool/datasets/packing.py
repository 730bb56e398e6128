"""From rows to the token sequences that run: one row each, or several packed into a context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lenspool.card import ModelCard
from lenspool.datasets.sources import SourceRow
from lenspool.errors import InvalidJob
from lenspool.job import tokenize
from lenspool.tokenizer import Tokenizer


@dataclass(frozen=True)
class Span:
    """Where tokens of a row stand in a sequence: `[start, stop)`."""

    row: SourceRow
    start: int
    stop: int


@dataclass
class Sequence:
    """Tokens that run together."""

    tokens: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Packing:
    """How rows become sequences.

    Attributes
    ----------
    context
        Tokens of a sequence, into which rows are packed one behind the other, cut where it is full; None: one row
        each.
    separator
        Token between two rows of a context.
    begin
        Token at the start of each context.
    max_length
        Of one row: how many of its tokens are taken, the first ones.
    """

    context: int | None = None
    separator: int | None = None
    begin: int | None = None
    max_length: int | None = None

    @classmethod
    def checked(
        cls,
        card: ModelCard,
        tokenizer: Tokenizer | None,
        context: int | None,
        separator: int | str | None,
        begin: int | str | None,
        max_length: int | None,
    ) -> Packing:
        """Check the options, and find the tokens of those that are given as text.

        Raises
        ------
        InvalidJob
            One is wrong.
        """
        most = card.max_model_len - 1
        for name, value in (("context", context), ("max_length", max_length)):
            if value is not None and (type(value) is not int or not 2 <= value <= most):
                raise InvalidJob(name, f"got {value!r}", f"an int from 2 to {most}")
        ids: dict[str, int | None] = {}
        for name, token in (("separator", separator), ("begin", begin)):
            if token is not None and context is None:
                raise InvalidJob(name, "is for rows that are packed", "None without a context")
            ids[name] = None if token is None else _token(card, tokenizer, name, token)
        return cls(context, ids["separator"], ids["begin"], max_length)

    def tokens(self, card: ModelCard, tokenizer: Tokenizer | None, prompt: Any) -> list[int]:
        """Tokens of a row. Of text that is packed without those that the tokenizer adds to a prompt.

        Raises
        ------
        InvalidJob
            It is no prompt.
        """
        if self.context is not None and isinstance(prompt, str) and prompt and tokenizer is not None:
            ids = tokenizer.encode(prompt, special=False)
        else:
            ids = tokenize(card, tokenizer, prompt)
        return ids[: self.max_length]

    def sequences(self, rows: Iterable[tuple[SourceRow, list[int]]]) -> Iterator[Sequence]:
        """Sequences of rows with their tokens; the last one may be shorter than the context."""
        if self.context is None:
            yield from (Sequence(tokens, [Span(row, 0, len(tokens))]) for row, tokens in rows)
            return
        opening = [] if self.begin is None else [self.begin]
        made = Sequence(list(opening))
        for row, tokens in rows:
            if self.separator is not None and made.spans and len(made.tokens) < self.context:
                made.tokens.append(self.separator)
            taken = 0
            while taken < len(tokens):
                if len(made.tokens) >= self.context:
                    yield made
                    made = Sequence(list(opening))
                start = len(made.tokens)
                piece = tokens[taken : taken + self.context - start]
                made.tokens += piece
                made.spans.append(Span(row, start, start + len(piece)))
                taken += len(piece)
        if made.spans:
            yield made


def _token(card: ModelCard, tokenizer: Tokenizer | None, name: str, token: int | str) -> int:
    ids = [token]
    if isinstance(token, str):
        ids = list(tokenizer.encode(token, special=False)) if tokenizer is not None else []
    if len(ids) != 1 or type(ids[0]) is not int or not 0 <= ids[0] < card.vocab_size:
        raise InvalidJob(name, f"{token!r} is not one token", "a token id, or the text of one token")
    return ids[0]
