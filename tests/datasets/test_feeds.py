"""What is written for other libraries, read by their own loaders. Those with pins of their own are in tests/e2e."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lenspool import Dataset, InvalidJob
from lenspool.feeds import ActivationBuffer, save_latents, save_parquet, save_sae_lens, save_safetensors, save_zarr
from lenspool.readouts import loss, sae
from lenspool.testing import FakePool

HOOK = "blocks.1.hook_resid_post"


def test_cached_activations_of_sae_lens(packed: Dataset, dataset: Dataset, tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets", reason="an extra")
    counts = save_sae_lens(packed, "resid_post.-1", tmp_path / "out")
    loaded = hf.load_from_disk(str(tmp_path / "out")).with_format("numpy")
    whole = [i for i in range(len(packed)) if len(packed.token_ids(i)) == 32]
    assert counts == {"contexts": len(whole), "tokens": 32 * len(whole), "left_out": packed.n_tokens - 32 * len(whole)}
    assert loaded.features[HOOK].shape == (32, 16) and loaded.features["token_ids"].length == 32
    for row, number in zip(loaded, whole, strict=True):
        assert np.array_equal(row[HOOK], packed.matrix(number, HOOK))
        assert row["token_ids"].tolist() == packed.token_ids(number).tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    cut = save_sae_lens(dataset, HOOK, tmp_path / "cut", context=8, dtype="float16")  # longer sequences give several
    assert cut["contexts"] == sum(len(dataset.token_ids(i)) // 8 for i in range(len(dataset)))
    for field, options in (
        ("folder", {"folder": tmp_path / "cut", "context": 8}),
        ("context", {}),
        ("context", {"context": 999}),
    ):
        with pytest.raises(InvalidJob) as caught:
            save_sae_lens(dataset, HOOK, **{"folder": tmp_path / "new", **options})
        assert caught.value.field == field
    assert not (tmp_path / "new").exists()


def test_safetensors_and_zarr_have_all_rows(dataset: Dataset, tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors", reason="an extra").safe_open
    zarr = pytest.importorskip("zarr", reason="an extra")
    names = ["blocks.0.hook_resid_post", HOOK, "blocks.1.attn.hook_z"]
    with pytest.raises(InvalidJob, match="other positions"):
        save_zarr(dataset, tmp_path / "z", loss())
    counts = save_safetensors(dataset, tmp_path / "s", names, shard_bytes=40_000)
    assert counts["files"] > 2 and counts["tokens"] == dataset.n_tokens
    number = 0
    for path in sorted((tmp_path / "s").iterdir()):
        with safe_open(path, "np") as opened:
            assert opened.metadata()["first_sequence"] == str(number)
            starts = opened.get_tensor("starts")
            for start, stop in pairwise(starts):
                for name in names:
                    rows = opened.get_tensor(name)[start:stop]
                    assert np.array_equal(rows, dataset.matrix(number, name).astype(np.float32))
                assert opened.get_tensor("token_ids")[start:stop].tolist() == dataset.token_ids(number).tolist()
                number += 1
    assert number == len(dataset)
    assert save_zarr(dataset, tmp_path / "z", names) == {"sequences": number, "tokens": dataset.n_tokens}
    group = zarr.open_group(str(tmp_path / "z"), mode="r")
    assert group.attrs["dataset"] == dataset.hash
    whole = np.concatenate([dataset.matrix(i, HOOK) for i in range(number)]).astype(np.float32)
    assert np.array_equal(group[HOOK][:], whole) and group["starts"][-1] == len(whole)
    assert group["positions"][: group["starts"][1]].tolist() == dataset.positions(0).tolist()


def test_parquet_has_a_vector_for_each_row(dataset: Dataset, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="an extra")
    for pool, reduced in (("mean", np.mean), ("max", np.max)):
        assert save_parquet(dataset, tmp_path / pool, HOOK, pool=pool, skip=1) == {"rows": len(dataset)}
        table = pq.read_table(tmp_path / pool).to_pandas()
        assert table["label"].tolist() == [i % 2 for i in range(60)] and table["row"].tolist() == list(range(60))
        for i in (0, 31, 59):
            expected = reduced(dataset.matrix(i, HOOK)[1:].astype(np.float32), axis=0)
            assert np.allclose(table[HOOK][i], expected, rtol=1e-6)
    with pytest.raises(InvalidJob):
        save_parquet(dataset, tmp_path / "x", HOOK, pool="sum")


def test_the_buffer_goes_on_from_epoch_to_epoch(dataset: Dataset) -> None:
    pytest.importorskip("torch", reason="an extra")
    buffer = ActivationBuffer(dataset, HOOK, out_batch_size=100, seed=1)
    whole = dataset.n_tokens // 100
    batches = [next(buffer) for _ in range(2 * whole)]
    assert all(batch.shape == (100, 16) for batch in batches)
    for epoch in (batches[:whole], batches[whole:]):
        assert max(Counter(bytes(row.numpy()) for batch in epoch for row in batch).values()) == 1
    assert buffer.config["d_submodule"] == buffer.d_submodule == 16
    with pytest.raises(InvalidJob):
        ActivationBuffer(dataset, HOOK, out_batch_size=10**6)
    assert next(ActivationBuffer(dataset, HOOK, 1100, skip=100), None) is None  # too few are left for one batch


async def test_latents_need_features_of_all_positions(dataset: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="an extra")
    with pytest.raises(InvalidJob, match=r"0 readouts made by readouts\.sae"):
        save_latents(dataset, tmp_path)
    client = FakePool(store=tmp_path / "store").client()
    features = sae("resid_post.1", np.ones((16, 40)), np.zeros(40), k=4)
    last = await client.dataset("last", ["some text", "other text"], features, positions="last")
    with pytest.raises(InvalidJob, match="all positions"):
        save_latents(last, tmp_path)
    with pytest.raises(InvalidJob, match="n_splits"):
        save_latents(last, tmp_path, n_splits=41)
