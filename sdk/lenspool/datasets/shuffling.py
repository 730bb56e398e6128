"""Rows of many sequences, mixed in a buffer of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def shuffled(
    parts: Iterable[np.ndarray], batch_size: int, buffer: int, random: np.random.Generator
) -> Iterator[np.ndarray]:
    """Batches of rows in random order.

    The buffer is filled, mixed, and half of it is given away before it is filled again, so that a row meets those of
    sequences that are far from its own.

    Parameters
    ----------
    parts
        Arrays `[rows, width]` of any number of rows.
    batch_size
        Rows of a batch; the last one may have fewer.
    buffer
        Rows that are held, beside one of the parts; at least two batches.

    Yields
    ------
    numpy.ndarray
        `[batch_size, width]`. Each row comes once.
    """
    capacity = max(buffer, 2 * batch_size)
    held: list[np.ndarray] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(part)
        if count >= capacity:
            mixed = np.concatenate(held)[random.permutation(count)]
            given = max(count // 2 // batch_size, 1) * batch_size
            for start in range(0, given, batch_size):
                yield mixed[start : start + batch_size]
            held, count = [mixed[given:].copy()], count - given
    if count:
        mixed = np.concatenate(held)[random.permutation(count)]
        for start in range(0, count, batch_size):
            yield mixed[start : start + batch_size]
