"""Bars: where someone sees them, seldom, and never in the caller's own output."""

from __future__ import annotations

import io
import sys
import types

import pytest

from lenspool.progress import progress_bar, waiting


class _Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


@pytest.mark.parametrize(("terminal", "show"), [(True, True), (True, False), (False, True)])
def test_a_bar_is_drawn_for_who_sees_it(monkeypatch: pytest.MonkeyPatch, terminal: bool, show: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _Terminal() if terminal else io.StringIO())
    items = range(5000)
    with progress_bar(show, items, "capture") as advance:
        for _ in items:
            advance()
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    if terminal and show:
        assert "capture" in text and "5000/5000" in text and "/s" in text
        assert sys.stderr.writes < 200  # type: ignore[attr-defined]
    else:
        assert text == ""


def test_what_the_caller_prints_stays_on_its_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _Terminal())
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # a file or a pipe
    with progress_bar(True, range(3), "capture") as advance:
        for i in range(3):
            print("row", i)
            advance()
    assert sys.stdout.getvalue() == "row 0\nrow 1\nrow 2\n"  # type: ignore[attr-defined]
    assert "row" not in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_drawing_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the work and a slow terminal move; five draws a second would take a tenth or more."""
    clock = drawn = 0.0

    class Slow(_Terminal):
        def flush(self) -> None:
            nonlocal clock, drawn
            clock, drawn = clock + 0.02, drawn + 0.02

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Slow())
    monkeypatch.setattr("lenspool.progress.time", types.SimpleNamespace(monotonic=lambda: clock))
    with progress_bar(True, range(10**6), "capture") as advance:
        before = drawn
        while clock < 600:
            clock += 0.01
            advance()
        assert 0.005 < (drawn - before) / 600 < 0.012


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_waited_for_is_said_where_someone_sees_it(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _Terminal() if terminal else io.StringIO())
    with waiting(True, "starting a pool"):
        pass
    with waiting(False, "something else"):
        pass
    text = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("starting a pool" in text) == terminal and "something else" not in text
