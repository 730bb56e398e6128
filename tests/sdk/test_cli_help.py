"""Every command answers programs in JSON, and says what each of its arguments is."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.table import Table

from lenspool.cli import app, asking
from lenspool.cli.tables import print_table
from lenspool_worker.__main__ import app as worker_app

PASSED_ON = ("up", "worker", "demo-model")
"""Commands of `lenspool` that are the worker's, which say all about themselves."""


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
            if command.invoke_without_command:
                yield f"{path}{name}", command
        else:
            yield f"{path}{name}", command


ALL = {
    **{name: command for name, command in commands(typer.main.get_command(app)) if name not in PASSED_ON},
    **dict(commands(typer.main.get_command(worker_app))),
}


@pytest.mark.parametrize("name", ALL)
def test_json_and_help(name: str) -> None:
    command = ALL[name]
    options = {option: parameter for parameter in command.params for option in parameter.opts}
    assert "--json" in options and command.help
    silent = [option for option, parameter in options.items() if not parameter.help and not parameter.hidden]
    assert not silent, f"lenspool {name} does not say what {silent} are"


def test_all_that_is_promised_is_there() -> None:
    promised = {"up", "worker", "status", "models", "hooks", "capture", "generate", "doctor", "queue"}
    assert promised <= ALL.keys() and {name.split()[0] for name in ALL} >= {"dataset", "cache"}


def test_completion_offers_nothing_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that waits for a pool would seem to hang."""
    monkeypatch.setattr(asking, "_COMPLETION_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        context: Any = SimpleNamespace(params={"redis": f"redis://127.0.0.1:{silent.getsockname()[1]}"})
        began = time.monotonic()
        assert asking.hook_names(context, "") == asking.model_names(context, "") == []
        assert time.monotonic() - began < 10


def test_a_pipe_gets_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("model", "hook", "what")
    names = ["m" * 90, "h" * 90, "a sentence of words"]
    table.add_row(*names)
    print_table(table)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "mmm" in line]
    assert all(name in line for name in names)


def test_the_workers_commands_go_by_the_name_that_one_types() -> None:
    command = [sys.executable, "-m", "lenspool.cli", "up", "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Usage: lenspool up" in answer.stdout and "--max-in-flight" in answer.stdout
