"""Rows of a dataset job: from an iterable, a file, or a Hugging Face dataset, with the prompt in one column."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lenspool.errors import InvalidJob
from lenspool.extras import needed


@dataclass(frozen=True)
class SourceRow:
    """One row as it was read.

    Attributes
    ----------
    index
        Its number, from 0.
    prompt
        Text, messages or token ids; None where the row has no such column.
    columns
        The others, as JSON values.
    """

    index: int
    prompt: Any
    columns: dict[str, Any]


class Source:
    """The rows of a dataset job.

    Parameters
    ----------
    rows
        An iterable of prompts or of mappings (`datasets.Dataset` is one), a table of pandas, polars or pyarrow, or the
        path of a `.jsonl`, `.parquet` or `.csv` file.
    prompt
        The column that holds the prompt, where rows are mappings.
    columns
        Which other columns are kept, one or several; default all.

    Raises
    ------
    InvalidJob
        It is none of these.
    """

    def __init__(self, rows: Any, prompt: str = "text", columns: str | Sequence[str] | None = None) -> None:
        self.prompt = prompt
        self.columns = [columns] if isinstance(columns, str) else None if columns is None else list(columns)
        self._rows: Any = _of_table(rows)
        self._open: Callable[[Path], Iterable[Any]] | None = None
        if isinstance(rows, (str, Path)):
            self._rows = Path(rows)
            self._open = _FILES.get(self._rows.suffix)
            if self._open is None or not self._rows.is_file():
                raise InvalidJob("rows", f"{rows} is no file that can be read", f"a file that ends in {_KNOWN}")
        elif isinstance(self._rows, Mapping) or not isinstance(self._rows, Iterable):
            allowed = f"an iterable (of several splits one), or a file that ends in {_KNOWN}"
            raise InvalidJob("rows", f"got {type(rows).__name__}", allowed)

    @property
    def once(self) -> bool:
        """Whether the rows can be walked through only once."""
        return self._open is None and iter(self._rows) is self._rows

    @property
    def size(self) -> int | None:
        """How many rows there are, where that is known without reading them."""
        if isinstance(self._rows, Path):
            parquet = self._rows.suffix == ".parquet"
            return needed("pyarrow.parquet").ParquetFile(self._rows).metadata.num_rows if parquet else None
        return len(self._rows) if isinstance(self._rows, Sized) else None

    def chunks(self, size: int) -> Iterator[list[SourceRow]]:
        """The rows, so many at a time.

        Raises
        ------
        InvalidJob
            A column cannot be kept, or the first row has no prompt.
        """
        rows = self._walk()
        while chunk := list(islice(rows, size)):
            yield chunk

    def _walk(self) -> Iterator[SourceRow]:
        for index, row in enumerate(self._rows if self._open is None else self._open(self._rows)):
            if not isinstance(row, Mapping):
                yield SourceRow(index, _plain(row, "prompt", index), {})
                continue
            if index == 0:
                self._check(row)
            kept = [name for name in (row if self.columns is None else self.columns) if name != self.prompt]
            columns = {name: _plain(row.get(name), name, index) for name in kept}
            yield SourceRow(index, _plain(row.get(self.prompt), self.prompt, index), columns)

    def _check(self, row: Mapping[str, Any]) -> None:
        for field, names in (("prompt", [self.prompt]), ("columns", self.columns or [])):
            for name in names:
                if name not in row:
                    raise InvalidJob(field, f"the rows have no column {name!r}", ", ".join(map(str, row)))


def digest(spec: Mapping[str, Any], rows: Iterable[SourceRow]) -> str:
    """SHA-256 (hex) of what rows hold, and of what is asked of them."""
    hashed = hashlib.sha256(line(spec))
    for row in rows:
        hashed.update(line({"row": row.index, "prompt": row.prompt, "columns": row.columns}))
    return hashed.hexdigest()


def line(document: Any) -> bytes:
    """A document as one line of JSON, always the same."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any, name: str, index: int) -> Any:
    """A value as JSON has it: arrays as lists, numbers of numpy as numbers."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), name, index)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name, index) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, name, index) for item in value]
    raise InvalidJob("columns", f"{name!r} of row {index} is a {type(value).__name__}", "JSON values, or other columns")


def _of_table(rows: Any) -> Any:
    """A table of another library as its rows: walking through it would give its columns."""
    for method, arguments in (("to_pylist", ()), ("to_dicts", ()), ("to_dict", ("records",))):
        if hasattr(rows, method) and hasattr(rows, "columns"):
            return getattr(rows, method)(*arguments)
    return rows


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as stream:
        for number, text in enumerate(stream, 1):
            if text.strip():
                try:
                    yield json.loads(text)
                except ValueError as error:
                    raise InvalidJob("rows", f"{path}, line {number}: {error}", "JSON in each line") from None


def _comma_separated(path: Path) -> Iterator[Any]:
    with path.open(newline="", encoding="utf-8-sig") as stream:
        yield from csv.DictReader(stream)


def _parquet(path: Path) -> Iterator[Any]:
    for batch in needed("pyarrow.parquet").ParquetFile(path).iter_batches(batch_size=256):
        yield from batch.to_pylist()


_FILES: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _comma_separated,
    ".parquet": _parquet,
}
_KNOWN = ", ".join(_FILES)
