"""A client that opens the store itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lenspool import CacheMiss, ModelCard
from lenspool.access import RedisAccess, StoreAccess
from lenspool.job import prepare
from lenspool_cache import Store, evict

POST = "blocks.1.hook_resid_post"


async def test_rows_that_were_evicted_since(card: ModelCard, tmp_path: Path) -> None:
    """A result is lazy: what was evicted between the answer and the look is told, with what to do."""
    with Store(tmp_path / "store") as store:
        access = StoreAccess(store, RedisAccess.__new__(RedisAccess))
        request = prepare(card, None, prompt=[1, 2, 3], hooks=POST)
        store.put(request.run, {POST: [(0, np.ones((3, card.hooks[POST].width), np.float32))]})
        found = await access.find(request, ran=False)
        assert found.complete
        assert found.reader is not None
        assert found.reader(POST).shape == (3, card.hooks[POST].width)
        evict(store, [request.run.key])
        with pytest.raises(CacheMiss, match="the same call again computes it anew") as caught:
            found.reader(POST)
        assert caught.value.retryable
        assert not (await access.find(request, ran=False)).complete
