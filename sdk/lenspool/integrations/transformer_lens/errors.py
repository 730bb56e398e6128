"""The pool's refusals as the exceptions that TransformerLens's drivers raise."""

from __future__ import annotations

from lenspool.errors import InvalidJob


class BadInput(InvalidJob, ValueError):
    """An input or a specification is wrong."""


class Unsupported(InvalidJob, NotImplementedError):
    """What a pool cannot be asked for."""
