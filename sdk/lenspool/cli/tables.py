"""Tables of commands, and those of `lenspool status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table

_WIDE = 10_000


def print_table(table: Table | Group) -> None:
    """Print all that is in a table: in a terminal long names go on in the next line, in a pipe lines are long."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    for one in table.renderables if isinstance(table, Group) else [table]:
        if isinstance(one, Table):
            for column in one.columns:
                column.overflow = "fold"
    console.print(table)


def status_tables(rows: Sequence[Mapping[str, Any]]) -> Group:
    """Two tables of `Client.status`: models with their lanes, and workers."""
    models = Table("model", "lane", "queued", "oldest s", "running", "finished", "failed")
    workers = Table(
        "worker", "state", "in flight", "tokens/s", "batch", "steps", "reused", "retried", "failures", "held", "written"
    )
    for row in rows:
        totals = [str(row[name]) for name in ("running", "finished", "failed")]
        for lane, counts in row["lanes"].items():
            models.add_row(
                row["model"] if totals else "", lane, str(counts["queued"]), f"{counts['oldest']:.0f}", *totals
            )
            totals = []
        for worker in row["workers"]:
            workers.add_row(*_worker(worker))
    return Group(models, workers)


def _worker(worker: Mapping[str, Any]) -> list[str]:
    computed, reused = (worker.get(name, 0) for name in ("computed_rows", "reused_rows"))
    failures = ", ".join(f"{name} {count}" for name, count in worker.get("failures", {}).items())
    return [
        worker["name"],
        worker.get("state", "starting"),
        str(worker.get("in_flight", 0)),
        f"{worker.get('tokens_per_s', 0):.0f}",
        f"{worker.get('batch_tokens', 0):.0f}",
        str(worker.get("steps", 0)),
        f"{reused / (computed + reused):.0%}" if computed + reused else "-",
        str(worker.get("requeued", 0)),
        failures or "-",
        *(f"{worker.get(name, 0) / 1e6:.1f} MB" for name in ("held_bytes", "bytes_written")),
    ]
