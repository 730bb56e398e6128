"""Bars: where someone sees them, seldom, and never in the caller's own output."""

from __future__ import annotations

import io
import sys
import time

import pytest

from lenspool.progress import progress_bar


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


class _SlowTerminal(_Terminal):
    def flush(self) -> None:
        time.sleep(0.02)


def test_a_slow_terminal_is_drawn_on_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1.5 seconds, five draws a second of 20 ms each would take a tenth."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _SlowTerminal())
    draws = 0
    with progress_bar(True, range(10**9), "capture") as advance:
        end = time.monotonic() + 1.5
        while (now := time.monotonic()) < end:
            advance()
            draws += time.monotonic() - now > 0.02
    assert 1 <= draws <= 2
