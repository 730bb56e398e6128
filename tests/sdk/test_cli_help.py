"""Every command answers programs in JSON, and says what each of its arguments is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from lenspool.cli import app
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
