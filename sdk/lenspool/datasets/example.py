"""One sequence of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lenspool.result import Capture


class Example(Capture):
    """One sequence of a dataset: a `Capture`, and the rows that its tokens are of.

    Attributes
    ----------
    rows
        `(row, start, stop)` for each row that has tokens here: those at positions `[start, stop)`.
    columns
        Kept columns of each of these rows; of a dataset that is not packed `columns[0]`.
    """

    def __init__(self, document: Mapping[str, Any], **rest: Any) -> None:
        super().__init__(**rest)
        self.rows = [(int(row), int(start), int(stop)) for row, start, stop in document["rows"]]
        self.columns: list[dict[str, Any]] = document["columns"]
