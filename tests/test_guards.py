"""The tables of known faults, and of promises, name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("page", "heading"),
    [("architecture", "## Known faults"), ("reliability", "# What is promised when something fails")],
)
def test_every_guard_exists(page: str, heading: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    table = text.split(heading)[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for row in rows:
        guards = re.findall(r"`([\w/]+)\.(test_\w+)`", row)
        assert guards, f"no test is named: {row}"
        for module, name in guards:
            source = (ROOT / "tests" / f"{module}.py").read_text()
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{module}.{name}"
