"""`python -m lenspool.cli`: the same as `lenspool`."""

from lenspool.cli.main import app

app()
