"""Settings that a program need not repeat: environment variables and two files.

What a call or `Client(...)` is given comes first; then the environment; then `lenspool.toml` of the project; then
`~/.config/lenspool/config.toml` of the user (`$XDG_CONFIG_HOME/lenspool/config.toml` where that is set).

The project's file stands in the working directory, or in a folder above it up to the one with `.git` or
`pyproject.toml`. `LENSPOOL_CONFIG` names one file that stands for both; empty, none is read.

::

    redis = "redis://gpu-host:6379"          # LENSPOOL_REDIS
    model = "smollm2-135m-instruct"          # LENSPOOL_MODEL
    store = "/shared/lenspool"               # LENSPOOL_STORE; false: results come through Redis
    priority = "batch"                       # LENSPOOL_PRIORITY, and so on: what else `Client.with_options` takes
    patience = 30                            # and inline_limit: see `lenspool.Client`
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenspool.arguments import Options, manner
from lenspool.errors import InvalidJob
from lenspool.sampling import check_integer
from lenspool.terms import check_seconds

_PLACES = ("redis", "store", "model")
NAMES = (*_PLACES, "inline_limit", "patience", *Options.__annotations__)
ENVIRONMENT = {name: f"LENSPOOL_{name.upper()}" for name in NAMES}
_PROJECT_FILE = "lenspool.toml"
_ROOT_MARKS = (".git", "pyproject.toml")


@dataclass(frozen=True)
class Settings:
    """What is set outside of the program.

    Attributes
    ----------
    values
        Name -> value, of what is set.
    origins
        Name -> the environment variable or the file that it comes from.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    @property
    def options(self) -> Options:
        """Defaults of calls."""
        found = {name: value for name, value in self.values.items() if name in Options.__annotations__}
        return Options(**found)  # type: ignore[typeddict-item]  # each was checked by its name


def settings() -> Settings:
    """Read the environment and the files.

    Raises
    ------
    InvalidJob
        A file cannot be read, has an unknown setting, or one of a wrong kind, or a variable has; names it, and where
        it stands.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files():
        found = _read(path)
        values |= found
        origins |= dict.fromkeys(found, str(path))
    for name, variable in ENVIRONMENT.items():
        if value := os.environ.get(variable):
            values[name], origins[name] = (
                _checked(name, value if name in _PLACES else _number(value), variable),
                variable,
            )
    return Settings(values, origins)


def files() -> list[Path]:
    """The files that are read, the one that comes first last."""
    named = os.environ.get("LENSPOOL_CONFIG")
    if named is not None:
        return [Path(named).expanduser()] if named else []
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    user = Path(home).expanduser() / "lenspool" / "config.toml"
    return [path for path in (user, *_project()) if path.is_file()]


def _project() -> Iterator[Path]:
    """The nearest file within the project; outside of one, a folder above may be a stranger's."""
    here = Path.cwd()
    folders = [here, *here.parents]
    root = next((i for i, folder in enumerate(folders) if any((folder / m).exists() for m in _ROOT_MARKS)), 0)
    for folder in folders[: root + 1]:
        if (folder / _PROJECT_FILE).is_file():
            yield folder / _PROJECT_FILE
            return


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidJob("config", f"{path}: {error}", "a readable TOML file; see lenspool.config") from None
    for name, value in values.items():
        if name not in NAMES:
            raise InvalidJob(name, f"unknown setting in {path}", ", ".join(NAMES))
        _checked(name, value, path)
    if isinstance(values.get("store"), str):
        values["store"] = str(path.parent / Path(values["store"]).expanduser())
    return values


def _number(text: str) -> Any:
    """The number that a variable holds; any other text as it is, to be refused by who knows what is allowed."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _checked(name: str, value: Any, origin: str | Path) -> Any:
    try:
        _check(name, value)
    except InvalidJob as error:
        raise InvalidJob(name, f"{error.reason} in {origin}", error.allowed) from None
    return value


def _check(name: str, value: Any) -> None:
    if name in _PLACES:
        if not (isinstance(value, str) and value) and not (name == "store" and value is False):
            raise InvalidJob(name, f"got {value!r}", "a string" + (", or false" if name == "store" else ""))
    elif name == "inline_limit":
        check_integer(name, value, 1, None)
    elif name == "patience":
        check_seconds(name, value)
    else:
        manner({name: value})
