"""Sequences, tokens, maps and numbers of a dataset, and how PyTorch reads it."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lenspool import CacheError, Dataset, InvalidJob, feeds
from lenspool.datasets.shuffling import shuffled
from lenspool.datasets.statistics import Statistics
from lenspool.readouts import loss, reduce
from lenspool_cache import Store

HOOK = "blocks.1.hook_resid_post"


def everything(dataset: Dataset, hook: str = HOOK) -> np.ndarray:
    return np.concatenate([dataset.matrix(i, hook) for i in range(len(dataset))])


def test_hooks_are_found_in_any_spelling(dataset: Dataset) -> None:
    assert dataset.column("resid_post.-1") == HOOK and dataset.column(loss()) == "unembed.hook_out|loss()"
    assert dataset.matrix(3, "z.1").shape == (len(dataset.token_ids(3)), 16) == dataset[3]["resid_post.1"].shape
    assert dataset.matrix(3, loss()).shape == (len(dataset.positions(3)) - 1, 1)
    assert len(dataset.token_ids(3, loss())) == len(dataset.positions(3)) - 1
    pooled = dataset.matrix(3, reduce("resid_post.1", "mean"))
    assert pooled.shape == (1, 16) and pooled.dtype == np.float32
    assert np.array_equal(pooled[0], dataset[3][reduce("resid_post.1", "mean")])
    for hook in ("resid_pre.0", "pattern.0", "resid_post.*"):
        with pytest.raises(InvalidJob):
            dataset.matrix(0, hook)


def test_it_can_be_sent_to_other_processes(dataset: Dataset) -> None:
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy.matrix(5, HOOK), dataset.matrix(5, HOOK))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        sums = pool.map(_total, [(dataset, i) for i in range(20)])
    assert sums == [_total((dataset, i)) for i in range(20)]


def _total(task: tuple[Dataset, int]) -> float:
    return float(task[0].matrix(task[1], HOOK).astype(np.float64).sum())


def test_another_store_is_not_taken_for_its_own(dataset: Dataset, tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    with pytest.raises(CacheError, match="is not at"):
        Dataset(dataset.folder, store=tmp_path / "store")


def test_rows_of_a_packed_dataset_are_found(packed: Dataset) -> None:
    assert len(packed) < packed.n_rows
    for row in range(packed.n_rows):
        found = packed.of_row(row)
        tokens = [t for e in found for n, a, b in e.rows if n == row for t in e.token_ids[a:b]]
        text = f"row {row} " + "of it " * (row % 5)
        assert len(tokens) == len(text) and all({"label": row % 2} in e.columns for e in found)
    with pytest.raises(IndexError):
        packed.of_row(packed.n_rows)


def test_statistics_are_those_of_numpy_in_float64(dataset: Dataset) -> None:
    rows = everything(dataset).astype(np.float64)
    found = dataset.statistics(HOOK)
    norms = np.linalg.norm(rows, axis=1)
    assert found.count == len(rows) == dataset.n_tokens
    assert np.allclose(found.mean, rows.mean(0), rtol=1e-12, atol=1e-14)
    assert np.allclose(found.std, rows.std(0), rtol=1e-12)
    assert found.mean_norm == pytest.approx(norms.mean(), rel=1e-12)
    assert found.rms_norm == pytest.approx(np.sqrt((norms**2).mean()), rel=1e-12)
    assert dataset.statistics(HOOK, skip=1).count == len(rows) - len(dataset)
    far = Statistics(3)  # a mean that is large beside the deviation: sums of squares would cancel
    values = np.random.default_rng(0).standard_normal((1000, 3)) + 1e8
    for part in np.array_split(values, 37):
        far.add(part)
    assert np.allclose(far.std, values.std(0), rtol=1e-6)


def test_a_map_has_all_rows(dataset: Dataset, tmp_path: Path) -> None:
    mapped = dataset.memmap("resid_post.1", tmp_path)
    assert isinstance(mapped.array, np.memmap) and mapped.array.dtype == np.float32 and len(mapped) == len(dataset)
    assert np.array_equal(mapped.array, everything(dataset).astype(np.float32))
    assert np.array_equal(mapped[7], dataset.matrix(7, HOOK).astype(np.float32))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    dataset.memmap(HOOK, tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} and len(before) == 2
    assert dataset.memmap(HOOK, tmp_path, "float16").array.dtype == np.float16
    with pytest.raises(InvalidJob):
        dataset.memmap(HOOK, tmp_path, "int8")


def test_the_buffer_gives_each_row_once_and_mixes_sequences() -> None:
    parts = [np.full((n, 2), i) + np.arange(n)[:, None] / 100 for i, n in enumerate([5, 40, 1, 0, 64, 30] * 10)]
    batches = list(shuffled(iter(parts), 16, 128, np.random.default_rng(0)))
    assert all(len(batch) == 16 for batch in batches[:-1])
    whole = np.concatenate(batches)
    assert Counter(whole[:, 0].tolist()) == Counter(np.concatenate(parts)[:, 0].tolist())
    assert all(len(set(batch[:, 0].astype(int))) > 2 for batch in batches)
    assert list(shuffled(iter([]), 4, 8, np.random.default_rng(0))) == []


def test_pytorch_reads_sequences_and_tokens_in_worker_processes(dataset: Dataset) -> None:
    torch = pytest.importorskip("torch", reason="an extra")
    loader = torch.utils.data.DataLoader(dataset.torch(HOOK), batch_size=None, num_workers=2)
    for number, item in enumerate(loader):
        assert item["token_ids"].tolist() == dataset.token_ids(number).tolist()
        assert item[HOOK].dtype == torch.bfloat16
        assert np.array_equal(item[HOOK].float().numpy(), dataset.matrix(number, HOOK).astype(np.float32))
    expected = Counter(map(bytes, everything(dataset).astype(np.float32)))
    tokens = dataset.torch_tokens(HOOK, 64, seed=3)
    alone = [list(tokens), list(tokens)]
    shared = list(torch.utils.data.DataLoader(dataset.torch_tokens(HOOK, 64, seed=3), batch_size=None, num_workers=2))
    for epoch in (*alone, shared):
        assert Counter(map(bytes, torch.cat(epoch).numpy())) == expected
        assert sum(batch.shape != (64, 16) for batch in epoch) <= 2  # the last one of each worker
    assert not torch.equal(alone[0][0], alone[1][0])
    assert torch.equal(alone[0][0], next(iter(dataset.torch_tokens(HOOK, 64, seed=3))))
    free = torch.utils.data.DataLoader(dataset.torch_tokens(HOOK, 64), batch_size=None, num_workers=1)
    assert not torch.equal(next(iter(free)), next(iter(free)))
    skipped = torch.cat(list(dataset.torch_tokens(HOOK, 64, skip=2)))
    assert len(skipped) == dataset.n_tokens - 2 * len(dataset)


def test_long_walks_show_how_far_they_are(
    dataset: Dataset, packed: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def bar(show: bool, items: Any, what: str) -> Iterator[Any]:
        done: list[int] = []
        yield lambda: done.append(1)
        assert show and len(done) == len(items) > 0
        seen.append(what)

    for module in ("lenspool.progress", "lenspool.feeds.arrays"):
        monkeypatch.setattr(f"{module}.progress_bar", bar)
    dataset.statistics(HOOK, progress=True)
    dataset.memmap(HOOK, tmp_path, progress=True)
    feeds.save_safetensors(packed, tmp_path / "safetensors", progress=True)
    feeds.save_zarr(packed, tmp_path / "zarr", progress=True)
    feeds.save_parquet(packed, tmp_path / "means.parquet", progress=True)
    feeds.save_sae_lens(packed, HOOK, tmp_path / "sae-lens", progress=True)
    assert seen == ["statistics", "memmap", "safetensors", "zarr", "parquet", "contexts"]
