"""Options of calls, of views and from outside: which comes first, and what is refused by name."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

import lenspool
from lenspool import Client, InvalidJob, PoolUnavailable, QueueFull, WorkerLost, config
from lenspool.retrying import persistent
from lenspool.testing import FakePool

PROJECT = 'redis = "redis://project"\nmodel = "theirs"\nretries = 2\nstore = "rows"\n'
USER = 'redis = "redis://user"\nstore = false\npriority = "batch"\npatience = 7\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory within a project, a user's file, and an empty environment."""
    for name in (*config.ENVIRONMENT.values(), "LENSPOOL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "lenspool").mkdir(parents=True)
    (tmp_path / "home" / "lenspool" / "config.toml").write_text(USER)
    inner = tmp_path / "work" / "project" / "deep"
    inner.mkdir(parents=True)
    (inner.parent / ".git").mkdir()
    (inner.parent / "lenspool.toml").write_text(PROJECT)
    monkeypatch.chdir(inner)
    return inner.parent


def test_what_is_nearest_comes_first(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = config.settings()
    assert found.values["redis"] == "redis://project" and found.values["priority"] == "batch"
    assert found.values["store"] == str(project / "rows")  # a relative folder is the file's, wherever one works
    assert found.origins["redis"] == str(project / "lenspool.toml")
    assert found.origins["patience"].endswith("home/lenspool/config.toml")
    monkeypatch.setenv("LENSPOOL_REDIS", "redis://environment")
    monkeypatch.setenv("LENSPOOL_MODEL", "")  # empty is as good as unset
    client = Client()
    assert (client.url, client.model) == ("redis://environment", "theirs")
    assert config.settings().origins["redis"] == "LENSPOOL_REDIS"
    assert Client("redis://argument", model="mine").url == "redis://argument"
    monkeypatch.setenv("LENSPOOL_PRIORITY", "interactive")
    monkeypatch.setenv("LENSPOOL_TIMEOUT", "2.5")
    assert Client()._options == {"priority": "interactive", "timeout": 2.5, "retries": 2}
    assert client.with_options(retries=0)._options == {"priority": "batch", "retries": 0}


def test_a_file_above_the_project_is_not_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "lenspool.toml").rename(project.parent / "lenspool.toml")
    assert config.settings().values["redis"] == "redis://user"
    monkeypatch.chdir(project.parent)  # no project: only the working directory counts
    assert config.settings().values["redis"] == "redis://project"
    (project.parent / "other").mkdir()
    monkeypatch.chdir(project.parent / "other")
    assert config.settings().values["redis"] == "redis://user"


def test_one_file_may_stand_for_both(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSPOOL_CONFIG", "")
    assert config.settings().values == {} and Client().url == "redis://localhost:6379"
    (project / "own.toml").write_text("timeout = 3\n")
    monkeypatch.setenv("LENSPOOL_CONFIG", str(project / "own.toml"))
    assert config.settings().options == {"timeout": 3}
    monkeypatch.setenv("LENSPOOL_CONFIG", str(project / "missing.toml"))
    with pytest.raises(InvalidJob, match=r"missing\.toml"):
        Client()


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('redist = "x"', "redist"),
        ("redis = 5", "redis"),
        ("store = true", "store"),
        ('priority = "fast"', "priority"),
        ("timeout = 0", "timeout"),
        ("patience = -1", "patience"),
        ("retries = 1.5", "retries"),
        ("inline_limit = 0", "inline_limit"),
        ("model = ", "config"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(project: Path, line: str, field: str) -> None:
    (project / "lenspool.toml").write_text(line + "\n")
    with pytest.raises(InvalidJob, match=r"lenspool\.toml") as caught:
        Client()
    assert caught.value.field == field and caught.value.allowed


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [("priority", "fast", "interactive, batch"), ("retries", "x", "int")]
)
def test_a_wrong_variable_is_refused_by_name(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    variable = config.ENVIRONMENT[name]
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidJob, match=f"'{value}' in {variable}") as caught:
        Client()
    assert caught.value.field == name and allowed in caught.value.allowed


async def test_a_view_has_other_defaults_and_the_same_pool() -> None:
    client = FakePool().client()
    view = client.with_options(timeout=5, priority="batch").with_options(timeout=7)
    assert view._options == {"timeout": 7, "priority": "batch"} and client._options.keys().isdisjoint(
        {"timeout", "priority"}
    )
    assert view._queue is client._queue and view._shared is client._shared
    assert view._manner({"priority": "interactive"}).terms.lane == "interactive"
    assert view._manner({}).timeout == 7
    hook = "resid_post.0"
    assert ((await view.capture("x", hook))[hook] == (await client.capture("x", hook))[hook]).all()
    wrong: Any = {"priority": "fast"}
    with pytest.raises(InvalidJob, match="priority"):
        client.with_options(**wrong)
    with pytest.raises(InvalidJob, match="retries"):
        await client.capture("x", hook, retries=-1)


async def test_an_argument_that_no_call_has_is_named_with_the_nearest() -> None:
    client = FakePool().client()
    wrong: Any = {"position": "last"}
    for call in (client.capture, client.submit_capture):
        with pytest.raises(TypeError, match=r"'position', did you mean 'positions'\?"):
            await call("x", "embed", **wrong)
    with pytest.raises(TypeError, match="map"):
        async for _ in client.map(["x"], "embed", **wrong):
            pass
    wrong = {"temprature": 1}
    with pytest.raises(TypeError, match="temperature"):
        await client.generate("x", **wrong)
    with pytest.raises(TypeError, match="timeout"):
        await client.submit_capture("x", "embed", timeout=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="priority"):
        client.with_options(lane="batch")  # type: ignore[call-arg]


async def test_calls_are_made_again_after_errors_that_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lenspool.retrying._FIRST_S", 0.05)
    errors: list[Exception] = [QueueFull(3), PoolUnavailable("away"), WorkerLost(3)]
    seen: list[float | None] = []

    async def call(left: float | None) -> str:
        seen.append(left)
        if errors:
            raise errors.pop(0)
        return "answer"

    async with asyncio.timeout(30):
        assert await persistent(call, None, 3) == "answer" and seen == [None] * 4
        errors += [InvalidJob("x", "is wrong"), QueueFull(3)]
        with pytest.raises(InvalidJob):
            await persistent(call, None, 3)
        seen.clear()
        with pytest.raises(QueueFull):
            await persistent(call, None, 0)
        errors += [QueueFull(3)] * 9
        began = asyncio.get_running_loop().time()
        with pytest.raises(QueueFull):
            await persistent(call, 0.2, 9)  # the next pause would go beyond the limit
        assert asyncio.get_running_loop().time() - began < 0.2
        assert seen[1] == 0.2 and seen[1:] == sorted(seen[1:], reverse=True)  # type: ignore[operator]


async def test_a_client_is_closed_once_for_all_its_views() -> None:
    client = Client("redis://localhost:1", patience=0.2)
    async with asyncio.timeout(30):
        await client.with_options(priority="batch").close()
        with pytest.raises(RuntimeError, match="closed"):
            await client.capture("x", "embed")


@pytest.mark.parametrize("as_json", [True, False])
def test_the_log_is_written_once_and_only_ours(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    before = [(logger, logger.level, logger.propagate) for logger in map(logging.getLogger, lenspool.logs.LOGGERS)]
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    try:
        lenspool.configure_logging("DEBUG")
        lenspool.configure_logging("info", as_json=as_json)
        logging.getLogger("lenspool.link").info("one %s", "line")
        logging.getLogger("lenspool.link").debug("not this")
        logging.getLogger("elsewhere").warning("nor this")
        lines = [line for line in sys.stderr.getvalue().splitlines() if "nor this" not in line]  # type: ignore[attr-defined]
        assert len(lines) == 1 and "one line" in lines[0]
        if as_json:
            assert json.loads(lines[0]).items() >= {"level": "INFO", "logger": "lenspool.link"}.items()
        with pytest.raises(InvalidJob, match="LOUD"):
            lenspool.configure_logging("LOUD")
    finally:
        for logger, level, propagate in before:
            logger.handlers = [h for h in logger.handlers if h.name != lenspool.logs._NAME]
            logger.propagate = propagate
            logger.setLevel(level)
