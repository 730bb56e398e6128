"""What a worker does for its store's limits."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from store_samples import a_run, rows_of

from lenspool_cache import CacheError, Policy, Store
from lenspool_cache.layers import load_lower
from lenspool_worker.housekeeping import keep_limits, keep_uploaded, set_limits, set_lower


def test_limits_are_set_and_left(folder: Path) -> None:
    with Store(folder) as store:
        set_limits(store, None, None)
        assert not (folder / "policy.json").exists()
        set_limits(store, 1000, 2.0)
        assert store.policy == Policy(1000, 172_800)
        set_limits(store, None, 1.0)
        assert store.policy == Policy(1000, 86_400)
        set_limits(store, 0, None)
    with Store(folder, read_only=True) as store:
        assert store.policy == Policy(None, 86_400)


def test_limits_are_kept_in_the_background(folder: Path) -> None:
    with Store(folder) as store:
        store.put(a_run(), {"h": [(0, rows_of(0))]})

    async def main(store: Store) -> None:
        task = asyncio.create_task(keep_limits(store, every_s=0.01))
        async with asyncio.timeout(20):
            (folder / "policy.json").write_text("damaged")  # a failure does not end it
            await asyncio.sleep(0.1)
            store.policy = Policy(max_bytes=0)
            while store.lookup(a_run(), ["h"]):
                await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with Store(folder) as store:
        asyncio.run(main(store))


def test_lower_layers_are_set_and_left(folder: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "lab") as lab:
        lab.put(a_run(), {"h": [(0, rows_of(0))]})
    set_lower(folder, f"{tmp_path / 'lab'}, ")
    with Store(folder) as store:
        assert store.lookup(a_run(), ["h"])
    with pytest.raises(CacheError, match="is not a store"):
        set_lower(folder, str(tmp_path / "absent"))
    assert load_lower(folder) == [str(tmp_path / "lab")]
    set_lower(folder, "")
    assert load_lower(folder) == []


def test_what_is_new_is_uploaded_in_the_background(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Store(folder) as store:
        store.put(a_run(), {"h": [(0, rows_of(0))]})

    async def main(store: Store) -> None:
        bucket = tmp_path / "bucket"
        bucket.write_text("in the way")
        task = asyncio.create_task(keep_uploaded(store, f"file://{bucket}", every_s=0.01))
        async with asyncio.timeout(20):
            await asyncio.sleep(0.1)  # uploads fail, and go on
            bucket.unlink()
            while not list(bucket.glob("index/*.h5")):
                await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with Store(folder) as store:
        asyncio.run(main(store))
    with Store(tmp_path / "mine", lower=[f"file://{tmp_path}/bucket"]) as store:
        assert store.covered(a_run(), ["h"]) == {"h": [(0, 16)]}
