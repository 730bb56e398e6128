"""How far a long call is: a bar where someone sees it, nothing elsewhere."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_REDRAW_S = 0.2
_SHARE = 0.01
"""Of the time, what drawing may take: after a slow draw the next one is later."""


class _Bar(Protocol):
    def draw(self, done: int, seconds: float) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def progress_bar(show: bool, items: Iterable[Any], what: str) -> Iterator[Callable[[], None]]:
    """A function to call once for each item that is done; it draws a bar in a terminal (on stderr) or a notebook.

    Elsewhere, and without `show`, nothing is drawn. Redrawn five times a second at most, and so seldom that drawing
    takes a hundredth of the time.
    """
    bar = _bar(what, len(items) if isinstance(items, Sized) else None) if show else None
    if bar is None:
        yield lambda: None
        return
    began = time.monotonic()
    due = began + _REDRAW_S
    done = 0

    def draw() -> None:
        nonlocal due
        start = time.monotonic()
        bar.draw(done, start - began)
        now = time.monotonic()
        due = now + max(_REDRAW_S, (now - start) / _SHARE)

    def advance() -> None:
        nonlocal done
        done += 1
        if time.monotonic() >= due:
            draw()

    try:
        yield advance
    finally:
        draw()
        bar.close()


def tracked(items: Iterable[T], show: bool, what: str) -> Iterator[T]:
    """The items, with a bar of how many have been taken."""
    with progress_bar(show, items, what) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def waiting(show: bool, what: str) -> Iterator[None]:
    """Say what is waited for, in a terminal (on stderr) or a notebook; gone from the terminal when it is there."""
    if show and in_notebook():
        from IPython.display import HTML, display  # there in a notebook

        began = time.monotonic()
        handle = display(HTML(f"{html.escape(what)} ..."), display_id=True)
        yield
        handle.update(HTML(f"{html.escape(what)}: {time.monotonic() - began:.0f} s"))
    elif show and sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(what, refresh_per_second=4):
            yield
    else:
        yield


def in_notebook() -> bool:
    """Whether this is a kernel, whose cells a person looks at."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _bar(what: str, total: int | None) -> _Bar | None:
    """The bar for where this runs."""
    if in_notebook():
        return _NotebookBar(what, total)
    return _TerminalBar(what, total) if sys.stderr.isatty() else None


class _TerminalBar:
    def __init__(self, what: str, total: int | None) -> None:
        # not needed by a script that shows nothing
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        # What the caller prints must stay on its stdout: only what goes to the same terminal may take rich's way.
        together = sys.stdout.isatty()
        self._bar = Progress(
            *columns, console=Console(stderr=True), auto_refresh=False, redirect_stdout=together, redirect_stderr=True
        )
        self._task = self._bar.add_task(what, total=total, rate="")
        self._bar.start()

    def draw(self, done: int, seconds: float) -> None:
        self._bar.update(self._task, completed=done, rate=_rate(done, seconds))
        self._bar.refresh()

    def close(self) -> None:
        self._bar.stop()


class _NotebookBar:
    """A progress element of HTML, updated in its place; needs no widget library, and stays in the saved notebook."""

    def __init__(self, what: str, total: int | None) -> None:
        from IPython.display import HTML, display  # there in a notebook

        self._html, self._what, self._total = HTML, html.escape(what), total
        self._handle = display(HTML(self._text(0, 0.0)), display_id=True)

    def draw(self, done: int, seconds: float) -> None:
        self._handle.update(self._html(self._text(done, seconds)))

    def close(self) -> None:
        """Nothing is to be ended: the element stays as it was drawn last."""

    def _text(self, done: int, seconds: float) -> str:
        size = f" max={self._total} value={done}" if self._total else ""
        count = f"{done}/{self._total}" if self._total is not None else str(done)
        left = ""
        if self._total and 0 < done < self._total:
            left = f", {(self._total - done) * seconds / done:.0f} s left"
        return f"{self._what} <progress{size}></progress> {count} {_rate(done, seconds)}{left}"


def _rate(done: int, seconds: float) -> str:
    return f"{done / max(seconds, 1e-9):.1f}/s" if done else ""
