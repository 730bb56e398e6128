"""`lenspool models|hooks|status`: what a pool serves, and how it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from lenspool.cli.asking import Json, Model, Redis, ask, print_json
from lenspool.cli.tables import print_table, status_tables
from lenspool.client import Client


def models(redis: Redis = None, as_json: Json = False) -> None:
    """Models that live workers serve."""
    cards = ask(redis, None, lambda client: client.models())
    if as_json:
        print_json([card.to_dict() for card in cards])
        return
    table = Table("model", "architecture", "layers", "d_model", "dtype", "max_model_len", "hooks", "store")
    for card in cards:
        sizes = (card.n_layers, card.d_model, card.dtype, card.max_model_len, len(card.hooks))
        table.add_row(card.id, card.architecture, *map(str, sizes), card.store_path)
    print_table(table)


def hooks(redis: Redis = None, model: Model = None, as_json: Json = False) -> None:
    """Hooks of a model, with their widths."""
    infos = ask(redis, model, lambda client: client.hooks())
    if as_json:
        print_json([{"name": h.name, "width": h.width, "editable": h.editable, "shape": h.shape} for h in infos])
        return
    table = Table("hook", "width", "editable", "shape")
    for info in infos:
        table.add_row(info.name, str(info.width), "yes" if info.editable else "no", str(list(info.shape)))
    print_table(table)


def status(
    redis: Redis = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until interrupted.")] = False,
) -> None:
    """Live workers, and the jobs of each model by lane."""

    async def follow(client: Client) -> None:
        with Live(auto_refresh=False) as live:
            while True:
                rows = await client.status()
                if as_json:
                    print(json.dumps(rows), flush=True)
                else:
                    live.update(status_tables(rows), refresh=True)
                await asyncio.sleep(1.0)

    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            ask(redis, None, follow)
        return
    rows = ask(redis, None, lambda client: client.status())
    if as_json:
        print_json(rows)
    else:
        print_table(status_tables(rows))
