"""`lenspool capture|generate`: one prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from lenspool.cli import files
from lenspool.cli.asking import Json, Model, Priority, Redis, Retries, Timeout, ask, fail, hook_names, print_json
from lenspool.cli.tables import print_table
from lenspool.client import Client
from lenspool.errors import InvalidJob
from lenspool.generation import Generation

Positions = Annotated[str, typer.Option(help='"all", "last", or ints like "0,-1".')]


def capture(
    prompt: Annotated[str, typer.Argument(help="A text.")],
    hook: Annotated[
        list[str],
        typer.Argument(help="Hook names, short forms, globs or readouts.", autocompletion=hook_names),
    ],
    positions: Positions = "all",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the arrays to this .npz, .safetensors or .h5 file (bfloat16 stays in safetensors)."),
    ] = None,
    priority: Priority = None,
    timeout: Timeout = None,
    retries: Retries = None,
    redis: Redis = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Capture activations of a text; print shapes and norms."""
    try:
        where = _positions(positions)
        if out is not None:
            files.check_name(out)
    except InvalidJob as error:
        fail(error)

    async def work(client: Client) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        result = await client.capture(prompt, hook, positions=where)
        arrays = result.arrays()
        rows = [{"hook": name, "shape": list(a.shape), "mean_norm": _mean_norm(a)} for name, a in arrays.items()]
        about = {"prompt": prompt, "model": result.card.id, "token_ids": result.token_ids}
        about |= {"positions": result.positions.tolist()}
        return {**about, "tokens": result.tokens, "cached": result.cached, "hooks": rows}, arrays

    document, arrays = ask(redis, model, work, priority=priority, timeout=timeout, retries=retries)
    if out is not None:
        try:
            files.write(out, arrays, {name: document[name] for name in ("prompt", "model", "token_ids", "positions")})
        except (OSError, ImportError) as error:
            fail(error)
    if as_json:
        print_json(document)
        return
    table = Table("hook", "shape", "mean norm", title="from the store" if document["cached"] else "computed")
    for row in document["hooks"]:
        table.add_row(row["hook"], str(row["shape"]), f"{row['mean_norm']:.4g}")
    print_table(table)


def _positions(text: str) -> Any:
    if text.isalpha():
        return text
    try:
        return [int(p) for p in text.split(",")]
    except ValueError:
        raise InvalidJob("positions", f"got {text!r}", '"all", "last", or ints like "0,-1"') from None


def _mean_norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float32), axis=-1).mean())


def generate(
    prompt: Annotated[str, typer.Argument(help="A text.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to make.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers, where temperature is above 0.")] = None,
    priority: Priority = None,
    timeout: Timeout = None,
    retries: Retries = None,
    redis: Redis = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Continue a text; it is printed as it is made."""

    async def work(client: Client) -> Generation:
        stream = client.stream(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        async for delta in stream:
            if not as_json:
                print(delta.text if delta.index else prompt + delta.text, end="", flush=True)
        if not stream.exact and not as_json:  # its worker was lost, and a second run came out otherwise
            print(f"\n{prompt}{stream.result.text}", end="")
        return stream.result

    result = ask(redis, model, work, priority=priority, timeout=timeout, retries=retries)
    if as_json:
        print_json({"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason})
    else:
        print()
