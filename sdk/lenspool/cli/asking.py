"""Options that commands share, and the way from a command to a client's answer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from lenspool import terms
from lenspool.client import Client
from lenspool.errors import LenspoolError

T = TypeVar("T")

_PATIENCE_S = 10.0
_COMPLETION_S = 1.5


def ask(redis: str | None, model: str | None, work: Callable[[Client], Awaitable[T]], **options: Any) -> T:
    """Run one piece of work with a client; a lenspool error becomes one line and exit status 1.

    Options of calls (`lenspool.client.Options`) that are None are those that are set outside of the command.
    """
    given: Any = {name: value for name, value in options.items() if value is not None}

    async def main() -> T:
        async with Client(redis, model=model, patience=_PATIENCE_S) as client:
            return await work(client.with_options(**given))

    try:
        return asyncio.run(main())
    except LenspoolError as error:
        fail(error)


def fail(error: Exception) -> NoReturn:
    """End the command with one line and exit status 1."""
    print(f"lenspool: {error}", file=sys.stderr)
    raise typer.Exit(1) from None


def print_json(document: Any) -> None:
    """Print a document for programs."""
    print(json.dumps(document, indent=2))


def _complete(context: typer.Context, find: Callable[[Client], Awaitable[list[str]]], begun: str) -> list[str]:
    """What the shell offers; nothing when the pool does not answer at once."""

    async def main() -> list[str]:
        async with asyncio.timeout(_COMPLETION_S):
            where, which = (context.params.get(name) for name in ("redis", "model"))
            async with Client(where, model=which, patience=_COMPLETION_S) as client:
                return await find(client)

    try:
        return sorted(name for name in asyncio.run(main()) if name.startswith(begun))
    except (LenspoolError, TimeoutError):
        return []


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """Models that are served."""

    async def find(client: Client) -> list[str]:
        return [card.name for card in await client.models()]

    return _complete(context, find, incomplete)


def hook_names(context: typer.Context, incomplete: str) -> list[str]:
    """Hooks of the model."""

    async def find(client: Client) -> list[str]:
        return [hook.name for hook in await client.hooks()]

    return _complete(context, find, incomplete)


Redis = Annotated[str | None, typer.Option(envvar="LENSPOOL_REDIS", help="redis://, rediss:// or unix:// URL.")]
Model = Annotated[
    str | None,
    typer.Option(envvar="LENSPOOL_MODEL", help="Name of a served model.", autocompletion=model_names),
]
Priority = Annotated[
    terms.Priority | None,
    typer.Option(help="Whether somebody waits for it, or others may pass.", envvar="LENSPOOL_PRIORITY"),
]
Timeout = Annotated[
    float | None, typer.Option(help="Seconds after which to give up; default: never.", envvar="LENSPOOL_TIMEOUT")
]
Retries = Annotated[
    int | None,
    typer.Option(min=0, help="Tries after the first when the pool is full or gone.", envvar="LENSPOOL_RETRIES"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
