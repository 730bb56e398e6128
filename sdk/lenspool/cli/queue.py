"""`lenspool queue`: jobs that wait, run and have failed, whoever asked for them; cancel them or run them again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from lenspool.cli.asking import Json, Model, Redis, ask, print_json
from lenspool.cli.tables import print_table
from lenspool.client import Client
from lenspool.operating import JobView, Operator

app = typer.Typer(help="Jobs that wait, run and have failed; cancel them, or run them again.")

Jobs = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs, or their first characters (4 up).")]
_SHORT = 12


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of each queue.")] = 50,
    redis: Redis = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Show jobs that wait, with lane and place in their client's queue, that run, and that failed lately."""
    context.obj = redis
    if context.invoked_subcommand is not None:
        return
    views = ask(redis, None, lambda client: Operator(client._queue).jobs(model=model, limit=limit))
    if as_json:
        print_json([asdict(view) for view in views])
        return
    if views:
        print_table(_table(views))
    else:
        print("no job waits, runs or has failed lately")


@app.command()
def cancel(context: typer.Context, job: Jobs, redis: Redis = None, as_json: Json = False) -> None:
    """Take jobs out of the pool, whoever waits for them: they are told `JobCancelled`."""
    _each(redis or context.obj, job, "cancelled", lambda operator, name: operator.cancel(name), as_json)


@app.command()
def requeue(context: typer.Context, job: Jobs, redis: Redis = None, as_json: Json = False) -> None:
    """Have jobs that failed or were cancelled run again."""
    _each(redis or context.obj, job, "requeued", lambda operator, name: operator.requeue(name), as_json)


def _each(
    redis: str | None,
    names: Sequence[str],
    done: str,
    act: Callable[[Operator, str], Awaitable[str]],
    as_json: bool,
) -> None:
    async def work(client: Client) -> list[str]:
        operator = Operator(client._queue)
        return [await act(operator, name) for name in names]

    ids = ask(redis, None, work)
    if as_json:
        print_json({done: ids})
    else:
        print(*(f"{done} {job}" for job in ids), sep="\n")


def _table(views: Sequence[JobView]) -> Table:
    table = Table(Column("job", no_wrap=True), "model", "state", "lane", "client", "place", "seconds", "worker / error")
    for view in views:
        table.add_row(
            view.id[:_SHORT],
            view.model,
            view.state,
            view.lane,
            view.client[:_SHORT],
            "" if view.position is None else str(view.position),
            f"{view.seconds:.0f}",
            escape(view.error or view.worker),
        )
    return table
