"""Read a lenspool store with h5py and numpy alone, without lenspool. The layout is in docs/format.md.

python read_store.py STORE NAME RUN         (RUN: a run's key in hex, or its key document)
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np


def rows(dataset: h5py.Dataset, first: int, count: int) -> np.ndarray:
    """Rows of a pack as numbers; bfloat16 (2 bytes) is read raw and widened, which is faster than HDF5's conversion."""
    if dataset.attrs["dtype"] != "bfloat16":
        return dataset[first : first + count]
    width = dataset.shape[1]
    offset = dataset.id.get_offset() + 2 * first * width
    raw = np.fromfile(dataset.file.filename, "<u2", count * width, offset=offset)
    return (raw.astype("<u4") << 16).view("<f4").reshape(count, -1)


def entries(store: str) -> Iterator[tuple[bytes, str, int, np.ndarray]]:
    """(document, name, start, rows) of every record that is live and whole, oldest first."""
    files = [h5py.File(path, locking=False) for path in sorted(Path(store, "packs").glob("*.h5"))]
    found = [(file, record) for file in files for record in file["index"][:] if record["rows"]]
    sizes: dict[int, int] = {}
    for _, record in found:
        sizes[record["batch"]] = sizes.get(record["batch"], 0) + 1
    for file, record in sorted(found, key=lambda item: item[1]["time"]):
        if record["state"] == 0x3C or (record["state"] == 0 and sizes[record["batch"]] == record["batch_size"]):
            at, length = int(record["document_offset"]), int(record["document_length"])
            document = file["documents"][at : at + length].tobytes()
            at, length = int(record["name_offset"]), int(record["name_length"])
            name = file["documents"][at : at + length].tobytes().decode()
            width = int(record["row_width"] or file.attrs["width"])
            taken = int(record["rows"]) * width // int(file.attrs["width"])
            values = rows(file["rows"], int(record["row"]), taken).reshape(-1, width)
            yield document, name, int(record["start"]), values


def cut(run: dict, stop: int) -> list[dict]:
    """What the interventions of a run do in front of a position."""
    ends = [(e, [[a, min(stop if b is None else b, stop)] for a, b in e["ranges"]]) for e in run["interventions"]]
    cut = [{**e, "ranges": [r for r in ranges if r[0] < r[1]]} for e, ranges in ends]
    return [e for e in cut if e["ranges"]]


def alike(a: dict, b: dict) -> int:
    """Number of leading positions at which two runs have the same rows."""
    tokens = list(zip(a["tokens"], b["tokens"], strict=False))
    same = next((i for i, (x, y) in enumerate(tokens) if x != y), len(tokens))
    if (a["v"], a["context"]) != (b["v"], b["context"]) or "reuse" in a or "reuse" in b:
        return 0
    return next(stop for stop in range(same, -1, -1) if cut(a, stop) == cut(b, stop))


def main(store: str, name: str, run: str) -> None:
    """Print the rows of a run, its own first, then what it lacks from runs that begin like it."""
    found = [(document, start, values) for document, other, start, values in entries(store) if other == name]
    keys = {hashlib.sha256(document).hexdigest(): document for document, _, _ in found}
    wanted: dict = json.loads(keys.get(run, run) if run in keys or run.startswith("{") else "{}")
    lends = "hook_" in name and not ("|mean(" in name or "|max(" in name or name.endswith(("pattern", "attn_scores")))
    have = set()
    for own in (True, False) if wanted else ():
        for text, start, values in found:
            document = json.loads(text)
            if own and document == wanted:
                stop = start + len(values)
            elif own or not lends:
                continue
            else:
                stop = alike(document, wanted) - ("|loss(" in name)
            new = [p for p in range(start, min(stop, start + len(values))) if p not in have]
            have.update(new)
            if new:  # one line for each record that has some; its positions are consecutive but for what is there
                values = values[[p - start for p in new]].tolist()
                print(json.dumps({"document": document, "start": new[0], "positions": new, "rows": values}))


if __name__ == "__main__":
    main(*sys.argv[1:])
