"""Read a lenspool store with h5py and numpy alone, without lenspool. The layout is in docs/format.md.

python read_store.py STORE NAME RUN_KEY_HEX
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
    """(document, name, start, rows) of every record that is live and whole."""
    files = [h5py.File(path, locking=False) for path in sorted(Path(store, "packs").glob("*.h5"))]
    found = [(file, record) for file in files for record in file["index"][:] if record["rows"]]
    sizes: dict[int, int] = {}
    for _, record in found:
        sizes[record["batch"]] = sizes.get(record["batch"], 0) + 1
    for file, record in found:
        if record["state"] == 0x3C or (record["state"] == 0 and sizes[record["batch"]] == record["batch_size"]):
            at, length = int(record["document_offset"]), int(record["document_length"])
            document = file["documents"][at : at + length].tobytes()
            at, length = int(record["name_offset"]), int(record["name_length"])
            name = file["documents"][at : at + length].tobytes().decode()
            yield document, name, int(record["start"]), rows(file["rows"], int(record["row"]), int(record["rows"]))


if __name__ == "__main__":
    for document, name, start, values in entries(sys.argv[1]):
        if name == sys.argv[2] and hashlib.sha256(document).hexdigest() == sys.argv[3]:
            print(json.dumps({"document": json.loads(document), "start": start, "rows": values.tolist()}))
