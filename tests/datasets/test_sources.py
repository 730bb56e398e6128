"""Rows from everything that holds rows, and how they are packed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lenspool import InvalidJob
from lenspool.datasets.packing import Packing
from lenspool.datasets.sources import Source, SourceRow
from lenspool.testing import fake_card
from lenspool.testing.fake_model import byte_tokenizer
from tests.datasets.conftest import numbered

ROWS = numbered(20)


def read(rows: Any, **options: Any) -> list[SourceRow]:
    return [row for chunk in Source(rows, **options).chunks(7) for row in chunk]


def test_every_kind_of_source_gives_the_same_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="an extra")
    hugging_face = pytest.importorskip("datasets", reason="an extra")
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["text", "label"])
        writer.writeheader()
        writer.writerows(ROWS)
    expected = [SourceRow(i, row["text"], {"label": row["label"]}) for i, row in enumerate(ROWS)]
    table = hugging_face.Dataset.from_list(ROWS)
    for rows in (
        ROWS,
        iter(ROWS),
        table,
        table.to_iterable_dataset(),
        pa.Table.from_pylist(ROWS),
        table.to_pandas(),
        tmp_path / "a.jsonl",
        str(tmp_path / "a.parquet"),
    ):
        assert read(rows) == expected
    assert [row.columns["label"] for row in read(tmp_path / "a.csv")] == [str(row["label"]) for row in ROWS]
    assert [Source(r).size for r in (ROWS, iter(ROWS), table, tmp_path / "a.parquet")] == [20, None, 20, 20]
    assert [Source(r).once for r in (ROWS, iter(ROWS), table, tmp_path / "a.parquet")] == [False, True, False, False]


def test_prompts_need_no_columns_and_columns_are_chosen() -> None:
    assert [row.prompt for row in read(["a", [1, 2], np.array([3]), [{"role": "user", "content": "b"}]])] == [
        "a", [1, 2], [3], [{"role": "user", "content": "b"}]
    ]  # fmt: skip
    rows = [{"q": "x", "n": np.int64(3), "junk": b"", "list": (1, None)}]
    assert read(rows, prompt="q", columns=["n", "list"])[0] == SourceRow(0, "x", {"n": 3, "list": [1, None]})


@pytest.mark.parametrize(
    ("rows", "options", "field"),
    [
        (3, {}, "rows"),
        ({"text": "x"}, {}, "rows"),
        ("nowhere.jsonl", {}, "rows"),
        (__file__, {}, "rows"),
        ([{"text": "x"}], {"prompt": "prompt"}, "prompt"),
        ([{"text": "x"}], {"columns": ["label"]}, "columns"),
        ([{"text": "x", "raw": b""}], {}, "columns"),
    ],
)
def test_what_is_no_source_is_refused(rows: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        read(rows, **options)
    assert caught.value.field == field


@given(
    lengths=st.lists(st.integers(1, 40), max_size=12),
    context=st.integers(2, 16),
    separator=st.sampled_from([None, 500]),
    begin=st.sampled_from([None, 501]),
)
def test_packing_loses_and_repeats_no_token(
    lengths: list[int], context: int, separator: int | None, begin: int | None
) -> None:
    rows = [(SourceRow(i, None, {}), list(range(100 * i, 100 * i + n))) for i, n in enumerate(lengths)]
    made = list(Packing(context, separator, begin).sequences(rows))
    assert all(len(one.tokens) == context for one in made[:-1]) and all(len(one.tokens) <= context for one in made)
    pieces: dict[int, list[int]] = {}
    for one in made:
        assert begin is None or one.tokens[0] == begin
        covered = {0} if begin is not None else set()
        for span in one.spans:
            pieces.setdefault(span.row.index, []).extend(one.tokens[span.start : span.stop])
            covered |= set(range(span.start, span.stop))
        assert all(one.tokens[i] == separator for i in range(len(one.tokens)) if i not in covered)
        starts = [span.start for span in one.spans[1:]]
        assert separator is None or all(one.tokens[start - 1] == separator for start in starts)
    assert [pieces[row.index] for row, _ in rows] == [tokens for _, tokens in rows]


def test_options_of_packing_are_checked() -> None:
    card, tokenizer = fake_card(), byte_tokenizer()
    packing = Packing.checked(card, tokenizer, 64, "\n", 5, 9)
    assert packing == Packing(64, tokenizer.encode("\n")[0], 5, 9)
    assert packing.tokens(card, tokenizer, "a long text of many bytes") == tokenizer.encode("a long te")
    for name, options in {
        "context": (1, None, None, None),
        "max_length": (None, None, None, 5000),
        "separator": (64, "two", None, None),
        "begin": (None, None, 3, None),
    }.items():
        with pytest.raises(InvalidJob) as caught:
            Packing.checked(card, tokenizer, *options)  # type: ignore[arg-type]
        assert caught.value.field == name


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    """With the mark that Excel puts first, and with a line that is broken."""
    (tmp_path / "a.csv").write_text("text,label\nnaïve,1\n", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "naïve"}\n', encoding="utf-8-sig")
    assert [read(tmp_path / name)[0].prompt for name in ("a.csv", "a.jsonl")] == ["naïve"] * 2
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(InvalidJob, match=r"b\.jsonl, line 3"):
        read(tmp_path / "b.jsonl")
    assert read(ROWS, columns="label") == read(ROWS)
