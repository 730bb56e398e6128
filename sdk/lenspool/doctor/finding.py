"""What a check says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes
    ----------
    about
        What was looked at.
    state
        `ok`; `note` is worth knowing; a `warning` will hurt some day; with an `error` things do not work.
    said
        What was found.
    advice
        What to do about it; empty where nothing is to be done.
    """

    about: str
    state: State
    said: str
    advice: str = ""
