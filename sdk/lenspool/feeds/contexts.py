"""Rows of a hook in windows of one length, as trainers of sparse autoencoders want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lenspool.datasets.manifest import Dataset
from lenspool.errors import InvalidJob
from lenspool.progress import tracked


@dataclass
class Contexts:
    """Windows of `length` tokens of a dataset's sequences, with the rows of one hook.

    A sequence that is longer gives several; what is left at its end, and sequences that are shorter, are left out.

    Attributes
    ----------
    left_out
        Tokens that were left out so far.
    progress
        Show a bar while one walks through them.
    """

    dataset: Dataset
    hook: str
    length: int
    left_out: int = 0
    progress: bool = False

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pairs of token ids `[length]` and rows `[length, width]`."""
        self.left_out = 0
        for number in tracked(range(len(self.dataset)), self.progress, "contexts"):
            tokens = self.dataset.token_ids(number, self.hook)
            whole = len(tokens) // self.length * self.length
            self.left_out += len(tokens) - whole
            if not whole:
                continue
            rows = self.dataset.matrix(number, self.hook)
            for start in range(0, whole, self.length):
                yield tokens[start : start + self.length], rows[start : start + self.length]


def context_of(dataset: Dataset, context: Any) -> int:
    """The length that is asked for, else the one to which the dataset was packed.

    Raises
    ------
    InvalidJob
        It is no length, or none is known.
    """
    length = dataset.spec["packing"]["context"] if context is None else context
    if type(length) is not int or length < 1:
        reason = f"got {context!r}" if context is not None else "the dataset is not packed to one"
        raise InvalidJob("context", reason, "a number of tokens")
    return length
