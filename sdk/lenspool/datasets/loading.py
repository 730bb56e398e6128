"""A dataset for PyTorch: sequences by number, and shuffled batches of tokens' rows. Needs torch.

>>> DataLoader(dataset.torch("resid_post.5"), num_workers=4, collate_fn=list)  # doctest: +SKIP
>>> DataLoader(dataset.torch_tokens("resid_post.5", 4096, seed=0), batch_size=None, num_workers=4)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import data

from lenspool.datasets.mapped import plain_dtype
from lenspool.datasets.shuffling import shuffled
from lenspool.result import tensor

if TYPE_CHECKING:
    from lenspool.datasets.manifest import Dataset


class SequenceDataset(data.Dataset[dict[str, torch.Tensor]]):
    """Sequences: an item is a dict of `token_ids` `[rows]` and of each hook `[rows, width]`, in the model's dtype."""

    def __init__(self, dataset: Dataset, hooks: Sequence[str]) -> None:
        self.dataset, self.hooks = dataset, list(hooks)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        rows = {hook: tensor(self.dataset.matrix(number, hook)) for hook in self.hooks}
        return {"token_ids": torch.from_numpy(self.dataset.token_ids(number)), **rows}


class TokenDataset(data.IterableDataset[torch.Tensor]):
    """Batches `[batch_size, width]` of rows of single tokens, shuffled over sequences.

    The sequences are taken in random order, and their rows mixed in a buffer. In one epoch each row comes once, also
    with several workers of a `DataLoader` (with `batch_size=None`: the batches are made here), which share the
    sequences; the last batch of each worker may be smaller.

    Parameters
    ----------
    batch_size
        Rows.
    buffer
        Rows that are held; default 16 batches.
    seed
        Of the order, with the attribute `epoch`, for a given number of workers. None: another order each time. Workers
        that a loader starts anew for each epoch do not know how many there were: set `epoch` before.
    skip
        Positions at the start of each sequence that are left out.
    dtype
        Default as stored, bfloat16 as float32.
    """

    def __init__(
        self,
        dataset: Dataset,
        hook: str,
        batch_size: int,
        *,
        buffer: int | None = None,
        seed: int | None = None,
        skip: int = 0,
        dtype: Any | None = None,
    ) -> None:
        self.dataset, self.hook, self.batch_size = dataset, hook, batch_size
        self.buffer = buffer if buffer is not None else 16 * batch_size
        self.seed, self.skip, self.epoch = seed, skip, 0
        self.dtype = plain_dtype(dataset.dtype(hook), dtype)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """One epoch. Where the loader keeps its workers, they go on to the next one by themselves."""
        worker = data.get_worker_info()
        share, shares = (0, 1) if worker is None else (worker.id, worker.num_workers)
        base = [self.seed, self.epoch] if self.seed is not None else [_drawn(worker)]
        order = np.random.default_rng(base).permutation(len(self.dataset))[share::shares]
        random = np.random.default_rng([*base, share + 1])
        self.epoch += 1
        for batch in shuffled(self._rows(order), self.batch_size, self.buffer, random):
            yield torch.from_numpy(batch)

    def _rows(self, order: np.ndarray) -> Iterator[np.ndarray]:
        for number in order.tolist():
            rows = self.dataset.matrix(number, self.hook)
            if self.skip:
                rows = rows[self.dataset.positions(number, self.hook) >= self.skip]
            yield rows.astype(self.dtype, copy=False)


def _drawn(worker: Any) -> int:
    """A random seed that is common to the workers of one epoch."""
    if worker is not None:
        return int(worker.seed - worker.id)
    return int(torch.randint(2**62, ()))
