"""Arrays on the device: read once, and let go when others were used later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lenspool_cache import Store
from lenspool_worker.arrays import DeviceArrays


def test_the_last_used_arrays_stay_within_the_limit(tmp_path: Path) -> None:
    rows = [np.full(250, i, dtype=np.float32) for i in range(4)]  # 1000 bytes each
    with Store(tmp_path / "store") as store:
        digests = [store.put_array(array) for array in rows]
        arrays = DeviceArrays(torch.device("cpu"), limit=2500)
        arrays.store = store
        first, second = arrays(digests[0]), arrays(digests[1])
        assert arrays(digests[0]) is first
        third = arrays(digests[2])  # the second was used before the first
        assert arrays(digests[0]) is first and arrays(digests[2]) is third
        again = arrays(digests[1])
        assert again is not second and torch.equal(again, torch.from_numpy(rows[1]))
        assert torch.equal(second, torch.from_numpy(rows[1])), "who still uses it keeps it"
        with pytest.raises(KeyError):
            arrays("0" * 64)


def test_one_array_above_the_limit_is_served(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        digest = store.put_array(np.ones(1000, dtype=np.float32))
        arrays = DeviceArrays(torch.device("cpu"), limit=10)
        arrays.store = store
        assert arrays(digest) is arrays(digest)
