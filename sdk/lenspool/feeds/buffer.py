"""An object that dictionary_learning takes for its `ActivationBuffer`. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lenspool.datasets.manifest import Dataset
from lenspool.errors import InvalidJob
from lenspool.readouts import Readout

if TYPE_CHECKING:
    import torch


class ActivationBuffer:
    """Batches of shuffled rows of a dataset without end: `trainSAE(data=ActivationBuffer(dataset, hook), ...)`.

    Epochs follow one another, each in another order. Only whole batches are given, so that of each epoch a few rows
    may be left out.

    Parameters
    ----------
    out_batch_size
        Rows of a batch.
    device
        Where batches are given.
    options
        `buffer`, `seed`, `skip`, `dtype` of `lenspool.datasets.loading.TokenDataset`.

    Raises
    ------
    InvalidJob
        The dataset has fewer rows than a batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        hook: str | Readout,
        out_batch_size: int = 8192,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        if dataset.n_tokens < out_batch_size:
            raise InvalidJob("out_batch_size", f"the dataset has {dataset.n_tokens} tokens", "at most so many")
        self._tokens = dataset.torch_tokens(hook, out_batch_size, **options)
        self.d_submodule = dataset.width(hook)
        self.out_batch_size, self.device = out_batch_size, device
        self.io = "out"
        self._batches: Iterator[torch.Tensor] = iter(())

    def __iter__(self) -> ActivationBuffer:
        return self

    def __next__(self) -> torch.Tensor:
        """A batch `[out_batch_size, d_submodule]`."""
        fresh = False
        while True:
            for batch in self._batches:
                if len(batch) == self.out_batch_size:
                    return batch.to(self.device)
            if fresh:  # positions that are skipped leave less than a batch
                raise StopIteration
            fresh, self._batches = True, iter(self._tokens)

    @property
    def config(self) -> dict[str, Any]:
        """What dictionary_learning keeps beside a trained dictionary."""
        dataset = self._tokens.dataset
        return {
            "d_submodule": self.d_submodule,
            "io": self.io,
            "out_batch_size": self.out_batch_size,
            "device": self.device,
            "hook": self._tokens.hook,
            "model": dataset.card.id,
            "dataset": dataset.hash,
        }
