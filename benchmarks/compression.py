"""What lossless filters make of real activations: `python benchmarks/compression.py [model folder]`.

Chunks of 128 rows, as an HDF5 filter would get them, of some hooks of SmolLM2-135M over a page of text. Ratio is raw
bytes to compressed ones; speeds are MB of raw bytes per second on one core, through h5py into a file in memory.
Speed of the same chunks without a filter is the last line.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import h5py
import hdf5plugin
import ml_dtypes
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lenspool_worker.demo_model import default_folder, prepare

CHUNK, ROUNDS = 128, 3
FILTERS: dict[str, dict] = {
    "gzip 1 + shuffle": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    "lzf + shuffle": {"compression": "lzf", "shuffle": True},
    "bitshuffle lz4": dict(hdf5plugin.Bitshuffle(cname="lz4")),
    "bitshuffle zstd 3": dict(hdf5plugin.Bitshuffle(cname="zstd", clevel=3)),
    "zstd 3": dict(hdf5plugin.Zstd(clevel=3)),
    "blosc2 zstd 1 shuffle": dict(hdf5plugin.Blosc2(cname="zstd", clevel=1, filters=hdf5plugin.Blosc2.SHUFFLE)),
    "blosc2 zstd 5 bitshuffle": dict(hdf5plugin.Blosc2(cname="zstd", clevel=5, filters=hdf5plugin.Blosc2.BITSHUFFLE)),
    "ZFP reversible": dict(hdf5plugin.Zfp(reversible=True)),
    "none": {},
}


def activations(folder: Path) -> dict[str, np.ndarray]:
    """[rows, d_model] float32 of a few hooks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(Path(__file__).parents[1].joinpath("README.md").read_text()).input_ids
    ids = ids[: min(len(ids), 1024) // CHUNK * CHUNK]
    kept: dict[str, np.ndarray] = {}
    layer = model.model.layers[14]
    layer.self_attn.register_forward_hook(lambda m, i, out: kept.update({"attn_out.14": out[0][0].numpy()}))
    layer.mlp.act_fn.register_forward_hook(lambda m, i, out: kept.update({"mlp gate.14": out[0].numpy()}))
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    return {f"resid_post.{n}": states[n + 1][0].numpy() for n in (4, 14, 28)} | kept


def measure(rows: np.ndarray, options: dict) -> tuple[float, float, float]:
    """Ratio, and MB/s of writing and reading."""
    best = [float("inf")] * 2
    for _ in range(ROUNDS):
        with h5py.File("memory", "w", driver="core", backing_store=False, rdcc_nbytes=0) as file:  # no cache of chunks
            began = time.perf_counter()
            data = file.create_dataset("rows", data=rows, chunks=(CHUNK, rows.shape[1]), **options)
            file.flush()
            wrote = time.perf_counter()
            back = data[:]
            read = time.perf_counter()
            if not np.array_equal(back, rows):
                raise SystemExit("not lossless")
            best = [min(best[0], wrote - began), min(best[1], read - wrote)]
            ratio = rows.nbytes / data.id.get_storage_size()
    return ratio, *(rows.nbytes / 1e6 / seconds for seconds in best)


def main(folder: Path) -> None:
    """Print a line for each filter and element type, over all hooks."""
    hooks = activations(folder)
    kinds = {
        "float32": hooks,
        # As bits: float filters (ZFP) have no bfloat16, and all others see bytes.
        "bfloat16": {name: rows.astype(ml_dtypes.bfloat16).view(np.uint16) for name, rows in hooks.items()},
    }
    print(f"{'ratio':36}" + "".join(f"{name:>16}" for name in hooks) + f"{'write MB/s':>14}{'read MB/s':>14}")
    for kind, arrays in kinds.items():
        for name, options in FILTERS.items():
            if name == "ZFP reversible" and kind == "bfloat16":
                continue
            found = [measure(np.tile(rows, (4, 1)), options) for rows in arrays.values()]
            ratios = "".join(f"{ratio:16.2f}" for ratio, _, _ in found)
            speeds = "".join(f"{np.median([f[i] for f in found]):14.0f}" for i in (1, 2))
            print(f"{kind + ', ' + name:36}{ratios}{speeds}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else prepare(default_folder()))
