"""`lenspool cache ...`: look at a store, and keep it. It works on the store's folder; no pool needs to run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from lenspool.cli.tables import print_table
from lenspool.config import settings
from lenspool.errors import LenspoolError
from lenspool_cache import Policy, Run, Store, collect, save_lower, verify
from lenspool_cache import evict as evict_keys
from lenspool_cache.catalog import Entry, catalog, summary
from lenspool_cache.layers import load_lower
from lenspool_cache.prune import prune
from lenspool_cache.ranges import Range
from lenspool_cache.remote import Remote
from lenspool_cache.transfer import export as export_entries
from lenspool_cache.transfer import import_file
from lenspool_cache.upload import sweep, upload

app = typer.Typer(no_args_is_help=True, help="Look at a store and keep it.")


def configured() -> Path:
    """The folder that is set outside of the command."""
    try:
        folder = settings().values.get("store")
    except LenspoolError as error:
        raise typer.BadParameter(str(error)) from None
    if not folder:
        raise typer.BadParameter("which store? Give --store, LENSPOOL_STORE, or `store` in lenspool.toml")
    return Path(folder)


Folder = Annotated[
    Path, typer.Option("--store", envvar="LENSPOOL_STORE", help="Folder of the store.", default_factory=configured)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Key = Annotated[str, typer.Argument(help="Key of a run or an entry in hex, or its first characters (at least 4).")]
Keys = Annotated[list[str], typer.Argument(help="Keys of runs or entries in hex, or their first characters.")]

Pin = Annotated[str, typer.Argument(help="Name of a pin.")]
File = Annotated[Path, typer.Argument(help="An HDF5 file.")]

_SHORT = 12  # hex digits of a key in a table


@contextlib.contextmanager
def _opened(folder: Path, *, write: bool = False) -> Iterator[Store]:
    """The store, which must exist; an error of it becomes one line and exit status 1."""
    try:
        Store(folder, read_only=True).close()  # makes none where there is none
        with Store(folder, read_only=not write) as store:
            yield store
    except (LenspoolError, OSError, ValueError) as error:
        print(f"lenspool: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _show(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, indent=2))
        return
    for name, value in document.items():
        print(f"{name:16} {value}")


def _table(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("run", "key", "name", "positions", "dtype", "width", "bytes")
    table = Table(*columns)
    for row in rows:
        short = row | {"run": row["run"][:_SHORT], "key": row["key"][:_SHORT]}
        table.add_row(*(str(short[column]) for column in columns))
    print_table(table)


def _full_keys(store: Store, prefixes: list[str]) -> list[bytes]:
    """Keys of runs or entries; one that is written in full need not be stored."""
    out = []
    for prefix in prefixes:
        if len(prefix) == 64:
            out.append(bytes.fromhex(prefix))
            continue
        if len(prefix) < 4:
            raise ValueError(f"{prefix!r} is too short for a key: at least 4 hex digits")
        entries = list(catalog(store, prefix))
        found = {key for e in entries for key in (e.run.key, e.segment.key) if key.hex().startswith(prefix)}
        if len(found) != 1:
            raise ValueError(f"{len(found)} keys in the store begin with {prefix!r}")
        out += found
    return out


def _lent(store: Store, entries: list[Entry]) -> list[Entry]:
    """Entries of other runs that have rows of these entries' runs."""
    wanted: dict[bytes, tuple[Run, dict[str, list[Range]]]] = {}
    for entry in entries:
        run, names = wanted.setdefault(entry.run.key, (entry.run, {}))
        names[entry.name] = [(0, len(run.document.get("tokens", ())))]
    found = [s for run, names in wanted.values() for segments in store.find(run, names).values() for s in segments]
    missing = {(s.pack, s.slot) for s in found} - {(e.segment.pack, e.segment.slot) for e in entries}
    return [e for e in catalog(store) if (e.segment.pack, e.segment.slot) in missing] if missing else []


@app.command()
def stats(store: Folder, as_json: Json = False) -> None:
    """Sizes, limits and pins."""
    with _opened(store) as opened:
        pins = {name: len(keys) for name, keys in opened.pins.all().items()}
        _show({**opened.stats(), **asdict(opened.policy), "pins": pins}, as_json)


@app.command("ls")
def list_entries(
    store: Folder,
    name: Annotated[str | None, typer.Option(help="Only entries of this hook.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 100,
    as_json: Json = False,
) -> None:
    """Entries, oldest first."""
    with _opened(store) as opened:
        _table([summary(e) for e in catalog(opened) if name in (None, e.name)][-limit:], as_json)


@app.command()
def show(key: Key, store: Folder, as_json: Json = False) -> None:
    """The key document of a run and its entries."""
    with _opened(store) as opened:
        (full,) = _full_keys(opened, [key])
        entries = list(catalog(opened, full.hex()))
        if not entries:
            raise ValueError(f"nothing is stored under {key}")
        rows = [summary(entry) for entry in entries]
        if as_json:
            print(json.dumps({"document": entries[0].run.document, "entries": rows}, indent=2))
            return
        print(json.dumps(entries[0].run.document, indent=2))
        _table(rows, False)


@app.command()
def pin(name: Pin, keys: Keys, store: Folder, as_json: Json = False) -> None:
    """Keep runs or entries under a name, whatever the limits."""
    with _opened(store, write=True) as opened:
        opened.pins.add(name, _full_keys(opened, keys))
        _show({"name": name, "keys": sorted(key.hex() for key in opened.pins.all()[name])}, as_json)


@app.command()
def unpin(name: Pin, store: Folder, as_json: Json = False) -> None:
    """Give a name up."""
    with _opened(store, write=True) as opened:
        if not opened.pins.remove(name):
            raise ValueError(f"there is no pin {name!r}; there are {sorted(opened.pins.all())}")
        _show({"name": name, "keys": []}, as_json)


@app.command()
def evict(keys: Keys, store: Folder, as_json: Json = False) -> None:
    """Drop runs or entries now, pinned or not; `gc` gives their space back."""
    with _opened(store, write=True) as opened:
        _show({"evicted": evict_keys(opened, _full_keys(opened, keys))}, as_json)


@app.command()
def gc(
    store: Folder,
    max_bytes: Annotated[int | None, typer.Option(min=0, help="Limit for this time; default: the store's.")] = None,
    max_days: Annotated[float | None, typer.Option(min=0, help="Limit for this time; default: the store's.")] = None,
    bucket: Annotated[str | None, typer.Option(help="Delete in this bucket instead, to the limits given.")] = None,
    as_json: Json = False,
) -> None:
    """Evict what the limits do not allow, and compact. Of a bucket: delete what no index needs, then the oldest."""
    with _opened(store, write=True) as opened:
        policy = Policy() if bucket else opened.policy
        if max_bytes is not None:
            policy = replace(policy, max_bytes=max_bytes)
        if max_days is not None:
            policy = replace(policy, max_age_s=max_days * 86400)
        if bucket:
            with contextlib.closing(Remote(bucket)) as remote:
                _show(asdict(prune(remote, policy, opened.pins.keys())), as_json)
            return
        _show(asdict(collect(opened, policy)), as_json)


@app.command("verify")
def check(
    store: Folder,
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged and rebuild the index.")] = False,
    as_json: Json = False,
) -> None:
    """Check every record, key document and payload; exit status 1 if something is wrong and was not repaired."""
    with _opened(store, write=repair) as opened:
        report = verify(opened, repair=repair)
        _show({**asdict(report), "ok": report.ok}, as_json)
    if not (report.ok or report.repaired):
        raise typer.Exit(1)


@app.command()
def export(file: File, keys: Keys, store: Folder, as_json: Json = False) -> None:
    """Write runs or entries to a plain HDF5 file."""
    with _opened(store) as opened:
        entries = [entry for key in _full_keys(opened, keys) for entry in catalog(opened, key.hex())]
        entries += _lent(opened, entries)
        _show({"file": str(file), "entries": export_entries(opened, entries, file)}, as_json)


@app.command("import")
def import_(file: File, store: Folder, as_json: Json = False) -> None:
    """Put what `export` wrote into a store."""
    with _opened(store, write=True) as opened:
        _show({"file": str(file), "bytes": import_file(opened, file)}, as_json)


@app.command()
def lower(
    store: Folder,
    places: Annotated[list[str] | None, typer.Argument(help="Folders or s3:// URLs; without any: show.")] = None,
    none: Annotated[bool, typer.Option("--none", help="From now on no lower layers.")] = False,
    as_json: Json = False,
) -> None:
    """Stores that lie under this one and are only read: show them, or set them."""
    with _opened(store, write=bool(places or none)) as opened:
        if places or none:
            Store(opened.path, read_only=True, lower=places or ()).close()
            save_lower(opened.path, places or ())
        _show({"lower": load_lower(opened.path)}, as_json)


@app.command()
def push(url: Annotated[str, typer.Argument(help="s3:// URL.")], store: Folder, as_json: Json = False) -> None:
    """Upload what a bucket does not have; other stores name it as a lower layer."""
    with _opened(store, write=True) as opened, contextlib.closing(Remote(url)) as remote:
        done = upload(opened, remote)
        _show({**asdict(done), "swept": 0 if done.busy else sweep(remote)}, as_json)
