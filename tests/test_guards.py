"""The table of known faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_guard_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("## Known faults")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for row in rows:
        guards = re.findall(r"`([\w/]+)\.(test_\w+)`", row)
        assert guards, f"no test is named: {row}"
        for module, name in guards:
            source = (ROOT / "tests" / f"{module}.py").read_text()
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{module}.{name}"
