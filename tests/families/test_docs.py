"""docs/hooks.md says what the code says."""

from __future__ import annotations

from pathlib import Path

from lenspool_worker.families.docs import page
from lenspool_worker.families.table import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_current() -> None:
    assert (DOCS / "hooks.md").read_text() == page()


def test_parity_was_measured_for_every_family() -> None:
    measured = (DOCS / "parity.md").read_text()
    assert "did not run" not in measured
    for family in FAMILIES:
        assert f"| {family.name} |" in measured
