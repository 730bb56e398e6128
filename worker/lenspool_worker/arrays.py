"""Arrays of jobs on the model's device: vectors and patches of interventions, matrices of readouts."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from lenspool_cache import Store

_BYTES = 2 * 2**30


class DeviceArrays:
    """The arrays that were used last, by content hash, up to a number of bytes; a job that uses one keeps it longer.

    Attributes
    ----------
    store
        Where arrays come from.
    """

    def __init__(self, device: torch.device, limit: int = _BYTES) -> None:
        self._device = device
        self._limit = limit
        self._arrays: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.store: Store | None = None

    def __call__(self, digest: str) -> torch.Tensor:
        """A float32 array by its digest.

        Raises
        ------
        KeyError
            The store does not have it.
        """
        with self._lock:
            array = self._arrays.pop(digest, None)
            if array is None:
                if self.store is None:
                    raise RuntimeError("no store is connected")
                array = torch.from_numpy(self.store.get_array(digest)).to(self._device)
                self._bytes += array.nbytes
            self._arrays[digest] = array
            while len(self._arrays) > 1 and self._bytes > self._limit:
                self._bytes -= self._arrays.popitem(last=False)[1].nbytes
            return array
