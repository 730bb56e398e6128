"""`lenspool cache ...` on a store's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from store_samples import a_run, flip, pack_files, rows_of, same_bits
from typer.testing import CliRunner

from lenspool.cli import app
from lenspool_cache import Store
from lenspool_cache.segment import Layout


@pytest.fixture
def filled(folder: Path) -> Path:
    with Store(folder) as store:
        for number in range(4):
            store.put(a_run(number), {"h": [(2, rows_of(number, dtype="bfloat16"))], "g": [(0, rows_of(number))]})
    return folder


def call(folder: Path, *arguments: str, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["cache", *arguments, "--store", str(folder), "--json"])
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if result.stdout else result.stderr


def test_stats_ls_and_show(filled: Path) -> None:
    stats = call(filled, "stats")
    assert (stats["entries"], stats["packs"], stats["max_bytes"], stats["pins"]) == (8, 2, None, {})
    rows = call(filled, "ls")
    assert {(row["run"], row["key"], row["name"]) for row in rows} == {
        (a_run(n).key.hex(), a_run(n).entry(name).hex(), name) for n in range(4) for name in "hg"
    }
    (row,) = [row for row in call(filled, "ls", "--name", "h") if row["run"] == a_run(1).key.hex()]
    assert (row["positions"], row["dtype"], row["width"], row["bytes"]) == ([2, 18], "bfloat16", 64, 16 * 64 * 2)
    assert len(call(filled, "ls", "--limit", "3")) == 3
    shown = call(filled, "show", a_run(1).key.hex()[:10])
    assert shown["document"] == a_run(1).document
    assert sorted(entry["name"] for entry in shown["entries"]) == ["g", "h"]
    assert [e["name"] for e in call(filled, "show", a_run(1).entry("g").hex())["entries"]] == ["g"]


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["show", "KEY"], ["gc"], ["verify"]])
def test_tables_for_people(filled: Path, command: list[str]) -> None:
    command = [a_run(1).key.hex() if word == "KEY" else word for word in command]
    result = CliRunner().invoke(app, ["cache", *command, "--store", str(filled)])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) > 3


def test_pin_evict_gc_unpin(filled: Path) -> None:
    call(filled, "pin", "paper", a_run(1).key.hex()[:12], a_run(2).entry("h").hex())
    assert call(filled, "stats")["pins"] == {"paper": 2}
    assert call(filled, "evict", a_run(0).key.hex()) == {"evicted": 2}
    assert call(filled, "gc", "--max-bytes", "0")["evicted"] == 3
    assert {(row["run"][:8], row["name"]) for row in call(filled, "ls")} == {
        (a_run(1).key.hex()[:8], "h"),
        (a_run(1).key.hex()[:8], "g"),
        (a_run(2).key.hex()[:8], "h"),
    }
    call(filled, "unpin", "paper")
    assert "no pin" in call(filled, "unpin", "paper", status=1)
    assert call(filled, "gc", "--max-days", "0")["evicted"] == 3
    assert call(filled, "ls") == []


def test_verify_and_repair(filled: Path) -> None:
    assert call(filled, "verify")["ok"]
    (path,) = [p for p in pack_files(filled) if p.name.startswith("float32")]
    flip(path, Layout.read(path).rows_offset + 100)
    report = call(filled, "verify", status=1)
    assert not report["ok"]
    assert [damage["slot"] for damage in report["damaged"]] == [0]
    assert call(filled, "verify", "--repair")["repaired"]
    assert call(filled, "verify")["ok"]


def test_export_and_import(filled: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "out.h5", tmp_path / "other"
    Store(other).close()
    assert call(filled, "export", str(file), a_run(1).key.hex(), a_run(2).entry("h").hex())["entries"] == 3
    assert call(other, "import", str(file))["bytes"] == 2 * 16 * 64 * 2 + 16 * 64 * 4
    assert call(other, "import", str(file))["bytes"] == 0
    with Store(other) as store:
        assert same_bits(store.rows(a_run(1), "h", [(2, 18)]), rows_of(1, dtype="bfloat16"))
        assert same_bits(store.rows(a_run(1), "g", [(0, 16)]), rows_of(1))
        assert store.covered(a_run(2), ["g", "h"]) == {"h": [(2, 18)]}
    assert "exist" in call(filled, "export", str(file), a_run(1).key.hex(), status=1)
    flip(file, file.read_bytes().index(rows_of(1).tobytes()) + 9)
    Store(tmp_path / "third").close()
    assert "do not match" in call(tmp_path / "third", "import", str(file), status=1)
    file.write_bytes(b"garbage")
    assert "cannot be read" in call(other, "import", str(file), status=1)


def test_what_is_not_there(filled: Path, tmp_path: Path) -> None:
    assert "is not a store" in call(tmp_path / "absent", "gc", status=1)
    assert not (tmp_path / "absent").exists()
    assert "0 keys" in call(filled, "show", "abcdef123", status=1)
    assert "too short" in call(filled, "evict", "ab", status=1)
    assert "nothing is stored" in call(filled, "show", "0" * 64, status=1)


def test_lower_layers(filled: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    Store(mine).close()
    assert call(mine, "lower") == {"lower": []}
    assert call(mine, "lower", str(filled)) == {"lower": [str(filled)]}
    assert call(mine, "stats")["lower"] == str(filled)
    with Store(mine) as store:
        assert same_bits(store.rows(a_run(2), "g", [(0, 16)]), rows_of(2))
    assert "is not a store" in call(mine, "lower", str(tmp_path / "absent"), status=1)
    assert call(mine, "lower", "--none") == {"lower": []}


def test_push(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"file://{tmp_path}/bucket"
    assert call(filled, "push", url)["segments"] == 8
    assert call(filled, "push", url) == {"segments": 0, "nbytes": 0, "packs": 0, "arrays": 0, "busy": False, "swept": 0}
    with Store(tmp_path / "mine", lower=[url]) as store:
        assert same_bits(store.rows(a_run(2), "g", [(0, 16)]), rows_of(2))
