"""All rows of hooks as safetensors or zarr: `[tokens, width]`, with the tokens and where sequences begin."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lenspool.datasets.manifest import Dataset
from lenspool.datasets.mapped import plain_dtype
from lenspool.errors import InvalidJob
from lenspool.extras import needed
from lenspool.progress import progress_bar, tracked
from lenspool.readouts import Readout

Hooks = str | Readout | Sequence[str | Readout] | None
_ZARR_CHUNK = 4 << 20


def _columns(dataset: Dataset, hooks: Hooks) -> list[str]:
    """Names of hooks whose rows are at the same positions."""
    asked = [hooks] if isinstance(hooks, (str, Readout)) else list(hooks or dataset.hooks)
    names = [dataset.column(hook) for hook in asked]
    for name in names:
        if len(dataset) and not np.array_equal(dataset.positions(0, name), dataset.positions(0)):
            raise InvalidJob("hooks", f"{name} has rows at other positions", "hooks and readouts with a row per token")
        dataset.width(name)
    return names


def save_safetensors(
    dataset: Dataset,
    folder: str | os.PathLike[str],
    hooks: Hooks = None,
    *,
    dtype: Any | None = None,
    shard_bytes: int = 1 << 30,
    progress: bool = False,
) -> dict[str, int]:
    """Write files `rows-00000.safetensors`, ..., each with whole sequences.

    Each has an array `[tokens, width]` by the name of each hook, `token_ids` and `positions` `[tokens]`, and `starts`
    `[sequences + 1]`: rows of the file's sequence i are `starts[i]:starts[i + 1]`.

    Parameters
    ----------
    hooks
        Default all of the dataset.
    dtype
        Default as stored, bfloat16 as float32.
    shard_bytes
        About how large a file is, and how much memory this takes.
    progress
        Show a bar, in a terminal (on stderr) or notebook only.

    Returns
    -------
    dict
        `files`, `sequences` and `tokens`.
    """
    names, target = _columns(dataset, hooks), Path(folder)
    types = {name: plain_dtype(dataset.dtype(name), dtype) for name in names}
    per_token = sum(dataset.width(name) * types[name].itemsize for name in names) + 16
    target.mkdir(parents=True, exist_ok=True)
    files = tokens = first = 0
    with progress_bar(progress, range(len(dataset)), "safetensors") as advance:
        while first < len(dataset):
            stop, size = first, 0
            while stop < len(dataset) and (stop == first or size < shard_bytes):
                size += len(dataset.positions(stop)) * per_token
                stop += 1
            numbers = range(first, stop)
            positions = [dataset.positions(i) for i in numbers]
            starts = np.concatenate([[0], np.cumsum([len(p) for p in positions])]).astype(np.int64)
            arrays = {name: np.empty((starts[-1], dataset.width(name)), types[name]) for name in names}
            for name, array in arrays.items():
                for i, start, end in zip(numbers, starts, starts[1:], strict=False):
                    array[start:end] = dataset.matrix(i, name)
            arrays |= {
                "token_ids": np.concatenate([dataset.token_ids(i) for i in numbers]),
                "positions": np.concatenate(positions),
                "starts": starts,
            }
            metadata = {"model": dataset.card.id, "dataset": dataset.hash, "first_sequence": str(first)}
            needed("safetensors.numpy").save_file(arrays, target / f"rows-{files:05d}.safetensors", metadata)
            files, tokens, first = files + 1, tokens + int(starts[-1]), stop
            for _ in numbers:
                advance()
    return {"files": files, "sequences": len(dataset), "tokens": tokens}


def save_zarr(
    dataset: Dataset,
    folder: str | os.PathLike[str],
    hooks: Hooks = None,
    *,
    dtype: Any | None = None,
    progress: bool = False,
) -> dict[str, int]:
    """Write a zarr group: an array `[tokens, width]` by the name of each hook, `token_ids`, `positions` and `starts`.

    Rows of sequence i are `starts[i]:starts[i + 1]`; the group's attributes name model and dataset.

    Parameters
    ----------
    hooks
        Default all of the dataset.
    dtype
        Default as stored, bfloat16 as float32.
    progress
        Show a bar, in a terminal (on stderr) or notebook only.

    Returns
    -------
    dict
        `sequences` and `tokens`.
    """
    names = _columns(dataset, hooks)
    group = needed("zarr").open_group(str(folder), mode="w-")
    lengths = [len(dataset.positions(i)) for i in range(len(dataset))]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = int(starts[-1])
    columns = {}
    for name in names:
        chosen, width = plain_dtype(dataset.dtype(name), dtype), dataset.width(name)
        rows = max(1, _ZARR_CHUNK // (width * chosen.itemsize))
        columns[name] = group.create_array(name, shape=(tokens, width), chunks=(rows, width), dtype=chosen)
    ids = group.create_array("token_ids", shape=(tokens,), chunks=(1 << 18,), dtype="int64")
    positions = group.create_array("positions", shape=(tokens,), chunks=(1 << 18,), dtype="int64")
    group.create_array("starts", data=starts)
    group.attrs.update({"model": dataset.card.id, "dataset": dataset.hash})
    for first, stop in tracked(_blocks(starts, max(1, _ZARR_CHUNK // 4096)), progress, "zarr"):
        rows_of = slice(starts[first], starts[stop])
        numbers = range(first, stop)
        for name, column in columns.items():
            block = np.concatenate([dataset.matrix(i, name) for i in numbers])
            column[rows_of] = block.astype(column.dtype, copy=False)
        ids[rows_of] = np.concatenate([dataset.token_ids(i) for i in numbers])
        positions[rows_of] = np.concatenate([dataset.positions(i) for i in numbers])
    return {"sequences": len(dataset), "tokens": tokens}


def _blocks(starts: np.ndarray, tokens: int) -> list[tuple[int, int]]:
    """Ranges of sequences that have about so many tokens together."""
    edges = [0]
    while edges[-1] < len(starts) - 1:
        goal = starts[edges[-1]] + tokens
        edges.append(max(int(np.searchsorted(starts, goal, "right")) - 1, edges[-1] + 1))
    return list(itertools.pairwise(edges))
