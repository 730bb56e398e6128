"""The command line: `lenspool up|worker|demo-model|status|models|hooks|capture|generate|cache|dataset`."""

from lenspool.cli.main import app

__all__ = ["app"]
