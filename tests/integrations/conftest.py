"""inspect_ai draws its evals in the terminal, but not here."""

from __future__ import annotations

import os

os.environ.setdefault("INSPECT_DISPLAY", "none")
