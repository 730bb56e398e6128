"""`lenspool dataset ...`: capture many rows, see how far that is, and hand the result on.

`build` asks a pool; the others work on the dataset's folder and the store, and no pool needs to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from lenspool import feeds
from lenspool.cli.asking import Json, Model, Priority, Redis, fail, print_json
from lenspool.client import Client
from lenspool.datasets.folder import Folder
from lenspool.datasets.manifest import Dataset
from lenspool.datasets.options import DatasetOptions
from lenspool.errors import InvalidJob, LenspoolError

app = typer.Typer(no_args_is_help=True, help="Activations of many prompts: capture, look, hand on.")

Which = Annotated[str, typer.Argument(help="A dataset: its folder, or its name in the store.")]
StoreFolder = Annotated[Path | None, typer.Option("--store", envvar="LENSPOOL_STORE", help="Folder of the store.")]
Hook = Annotated[str, typer.Option("--hook", help="Which hook or readout of the dataset.")]
HooksOption = Annotated[list[str] | None, typer.Option("--hook", help="Hooks or readouts; may be repeated.")]


class Format(StrEnum):
    """What `export` writes."""

    sae_lens = "sae-lens"
    safetensors = "safetensors"
    zarr = "zarr"
    parquet = "parquet"
    delphi = "delphi"
    numpy = "numpy"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """An error becomes one line and exit status 1."""
    try:
        yield
    except (LenspoolError, ImportError, OSError) as error:
        fail(error)


def _show(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    for name, value in document.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name:16} {f'{shown:.6g}' if isinstance(shown, float) else shown}")


def _folder(which: str, store: Path | None) -> Path:
    if (Path(which) / "dataset.json").is_file():
        return Path(which)
    if store is None:
        raise InvalidJob("dataset", f"{which} is not the folder of one", "a folder, or a name and --store")
    return store / "datasets" / which


def _summary(dataset: Dataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "folder": str(dataset.folder),
        "hash": dataset.hash,
        "rows": dataset.n_rows,
        "sequences": len(dataset),
        "tokens": dataset.n_tokens,
        "failures": sum(1 for _ in dataset.failures()),
    }


@app.command()
def build(
    name: Annotated[str, typer.Argument(help="Of the dataset.")],
    file: Annotated[Path, typer.Argument(help="Rows: a .jsonl, .parquet or .csv file.")],
    hook: Annotated[list[str], typer.Option(help="Hooks or readouts to capture; may be repeated.")],
    prompt: Annotated[str, typer.Option(help="Column of the prompt.")] = "text",
    column: Annotated[list[str] | None, typer.Option(help="Other columns to keep; default all.")] = None,
    context: Annotated[int | None, typer.Option(help="Pack rows into sequences of so many tokens.")] = None,
    separator: Annotated[str | None, typer.Option(help="Text of the token between packed rows.")] = None,
    begin: Annotated[str | None, typer.Option(help="Text of the token at the start of each sequence.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Take only so many tokens of a row.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Rows that are done together.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Captures in flight.")] = 256,
    folder: Annotated[Path | None, typer.Option(help="Where the dataset is; default in the store.")] = None,
    priority: Priority = None,
    redis: Redis = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Capture all rows of a file. May be killed: the same command goes on; several of them share the work."""
    options: DatasetOptions = {
        "prompt": prompt,
        "columns": column or None,
        "context": context,
        "separator": separator,
        "begin": begin,
        "max_length": max_length,
        "chunk": chunk,
        "concurrency": concurrency,
        "folder": folder,
        "progress": not as_json,
    }
    if priority is not None:
        options["priority"] = priority

    async def work() -> Dataset:
        async with Client(redis, model=model) as client:
            return await client.dataset(name, file, hook, **options)

    with _errors():
        _show(_summary(asyncio.run(work())), as_json)


@app.command()
def status(dataset: Which, store: StoreFolder = None, as_json: Json = False) -> None:
    """How far a dataset is, also while it is made: rows, failures, rate and seconds left."""
    with _errors():
        _show(Folder(_folder(dataset, store)).status(), as_json)


@app.command()
def failures(dataset: Which, store: StoreFolder = None, as_json: Json = False) -> None:
    """Rows of a finished dataset that have no activations, and why."""
    with _errors():
        found = list(Dataset(_folder(dataset, store), store).failures())
        if as_json:
            print(json.dumps(found, indent=2))
            return
        for failure in found:
            print(f"{failure['row']:10} {failure['error']}: {failure['message']}")


@app.command()
def stats(
    dataset: Which,
    hook: Hook,
    skip: Annotated[int, typer.Option(min=0, help="Leave out so many first positions of each sequence.")] = 0,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Norms, mean and deviation of a hook's rows; the vectors with --json."""
    with _errors():
        opened = Dataset(_folder(dataset, store), store)
        found = opened.statistics(hook, skip=skip, progress=not as_json)
        document = {
            "hook": opened.column(hook),
            "count": found.count,
            "mean_norm": found.mean_norm,
            "rms_norm": found.rms_norm,
        }
        vectors = {"mean": found.mean.tolist(), "std": found.std.tolist()} if as_json else {}
        _show({**document, **vectors}, as_json)


@app.command()
def export(
    dataset: Which,
    out: Annotated[Path, typer.Argument(help="Folder to write; for parquet a file.")],
    format: Annotated[Format, typer.Option("--format", help="For whom.")],
    hook: HooksOption = None,
    context: Annotated[int | None, typer.Option(help="sae-lens: tokens per row.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float16, float32 or float64; default as stored.")] = None,
    pool: Annotated[str, typer.Option(help="parquet: mean, max or last.")] = "mean",
    splits: Annotated[int, typer.Option(min=1, help="delphi: files.")] = 5,
    tokenizer: Annotated[str | None, typer.Option(help="delphi: model whose tokenizer it loads.")] = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write a dataset in another library's format."""
    with _errors():
        opened = Dataset(_folder(dataset, store), store)
        hooks = list(hook or opened.hooks)
        if format in (Format.sae_lens, Format.numpy) and len(hooks) != 1:
            raise InvalidJob("hook", f"{format.value} takes one, and there are {len(hooks)}", ", ".join(opened.hooks))
        written: dict[str, Any]
        show = not as_json
        if format is Format.sae_lens:
            written = feeds.save_sae_lens(opened, hooks[0], out, context=context, dtype=dtype, progress=show)
        elif format is Format.safetensors:
            written = feeds.save_safetensors(opened, out, hooks, dtype=dtype, progress=show)
        elif format is Format.zarr:
            written = feeds.save_zarr(opened, out, hooks, dtype=dtype, progress=show)
        elif format is Format.parquet:
            written = feeds.save_parquet(opened, out, [*hooks], pool=pool, progress=show)
        elif format is Format.delphi:
            features = hook[0] if hook else None
            written = feeds.save_latents(opened, out, features, n_splits=splits, model_name=tokenizer, progress=show)
        else:
            mapped = opened.memmap(hooks[0], out, dtype, progress=show)
            written = {"sequences": len(mapped), "tokens": len(mapped.array)}
        _show({"format": format.value, "out": str(out), **written}, as_json)


@app.command()
def release(dataset: Which, store: StoreFolder = None, as_json: Json = False) -> None:
    """Give up the pins of a dataset: the store may evict its rows from now on."""
    with _errors():
        opened = Dataset(_folder(dataset, store), store)
        _show({"name": opened.name, "pins": opened.release()}, as_json)
