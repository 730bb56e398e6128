"""`lenspool doctor`: what is wrong with this setup, and what to do."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lenspool.cli.asking import Json, Model, Redis, print_json
from lenspool.doctor import examine

_COLOURS = {"ok": "green", "note": "blue", "warning": "yellow", "error": "red"}


def doctor(
    redis: Redis = None,
    model: Model = None,
    store: Annotated[str | None, typer.Option(envvar="LENSPOOL_STORE", help="Folder of the store.")] = None,
    folder: Annotated[Path | None, typer.Option("--model-folder", help="A model's folder to look at, too.")] = None,
    as_json: Json = False,
) -> None:
    """Check Redis, workers, store, versions, GPU and settings, and say what to do. Exit status 1 on an error."""
    findings = asyncio.run(examine(redis, model, store, folder))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        console = Console(highlight=False)
        for finding in findings:
            mark = f"[{_COLOURS[finding.state]}]{finding.state:8}[/]"
            console.print(f"{mark}{finding.about}: {escape(finding.said)}", soft_wrap=True)
            if finding.advice:
                console.print(f"        [bold]->[/] {escape(finding.advice)}", soft_wrap=True)
    if any(finding.state == "error" for finding in findings):
        raise typer.Exit(1)
