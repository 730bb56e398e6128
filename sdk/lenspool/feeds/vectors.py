"""One vector for each sequence, as Parquet: for probes and tables. Needs pyarrow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lenspool.datasets.manifest import Dataset
from lenspool.datasets.mapped import plain_dtype
from lenspool.errors import InvalidJob
from lenspool.extras import needed
from lenspool.progress import tracked
from lenspool.readouts import Readout

_POOLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0),
    "last": lambda rows: rows[-1],
}
_GROUP = 1024


def save_parquet(
    dataset: Dataset,
    file: str | os.PathLike[str],
    hooks: str | Readout | list[str | Readout] | None = None,
    *,
    pool: str = "mean",
    skip: int = 0,
    progress: bool = False,
) -> dict[str, int]:
    """Write a table with a row for each sequence: its kept columns, and a list of float32 for each hook.

    The column `row` is the number of the sequence's (first) row in the source; columns that are kept are those of this
    row.

    Parameters
    ----------
    hooks
        Default all of the dataset.
    pool
        How a sequence's rows become one: `"mean"`, `"max"` or `"last"`.
    skip
        Positions at the start of each sequence that are left out, where it has others.
    progress
        Show a bar, in a terminal (on stderr) or notebook only.

    Returns
    -------
    dict
        `rows` that were written.
    """
    if pool not in _POOLS:
        raise InvalidJob("pool", f"got {pool!r}", ", ".join(_POOLS))
    asked = [hooks] if isinstance(hooks, (str, Readout)) else list(hooks or dataset.hooks)
    names = [dataset.column(hook) for hook in asked]
    for name in names:
        plain_dtype(dataset.dtype(name))
    pq, writer = needed("pyarrow.parquet"), None
    import pyarrow as pa

    vectors = [pa.field(name, pa.list_(pa.float32(), dataset.width(name))) for name in names]
    try:
        for first in tracked(range(0, len(dataset), _GROUP), progress, "parquet"):
            table = pa.Table.from_pylist([_row(dataset, i, names, pool, skip) for i in _group(dataset, first)])
            for field in vectors:
                at = table.schema.get_field_index(field.name)
                table = table.set_column(at, field, table.column(at).cast(field.type))
            if writer is None:
                writer = pq.ParquetWriter(Path(file), table.schema)
            writer.write_table(table.cast(writer.schema))
    finally:
        if writer is not None:
            writer.close()
    return {"rows": len(dataset)}


def _group(dataset: Dataset, first: int) -> range:
    return range(first, min(first + _GROUP, len(dataset)))


def _row(dataset: Dataset, number: int, names: list[str], pool: str, skip: int) -> dict[str, Any]:
    example = dataset[number]
    row: dict[str, Any] = {**example.columns[0], "row": example.rows[0][0]}
    for name in names:
        rows = dataset.matrix(number, name).astype(np.float32)
        kept = rows[dataset.positions(number, name) >= skip]
        row[name] = _POOLS[pool](kept if len(kept) else rows)
    return row
