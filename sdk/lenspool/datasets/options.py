"""What `Client.dataset` can be told beside name, rows and hooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lenspool.arguments import CaptureOptions


class DatasetOptions(CaptureOptions, total=False):
    """Arguments of `Client.dataset`: those of `CaptureOptions` for each sequence (priority `"batch"`), and these.

    Attributes
    ----------
    prompt
        Column that holds the prompt, where rows are mappings; default `"text"`.
    columns
        Other columns that are kept, by row; default all. Their values must be JSON.
    context
        Pack rows one behind the other into sequences of so many tokens; default: a sequence for each row. Text is then
        tokenized without the special tokens that a prompt gets; the last sequence of a chunk may be shorter.
    separator, begin
        Token between two packed rows, and at the start of each packed sequence: an id, or the text of one token.
    max_length
        Take only so many tokens of a row, the first ones.
    chunk
        Rows that are done together, and done again when a process dies meanwhile; default 512.
    concurrency
        Captures in flight; default 256.
    folder
        Where the dataset is; default `datasets/<name>` in the store's folder.
    progress
        Show a bar with rate and time left, in a terminal (on stderr) or notebook only.
    """

    prompt: str
    columns: str | Sequence[str] | None
    context: int | None
    separator: int | str | None
    begin: int | str | None
    max_length: int | None
    chunk: int
    concurrency: int
    folder: str | Path | None
    progress: bool
