"""Writers, readers and a collector on one store, killed at any time; some seconds of `make store-stress`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SECONDS = 3.0


def test_no_wrong_bytes_and_nothing_committed_is_lost() -> None:
    command = [sys.executable, Path(__file__).with_name("stress.py"), "--short", "--seconds", str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    whole, limited = (
        dict(word.split("=") for word in line.split() if "=" in word) for line in done.stdout.splitlines()
    )
    assert min(int(part[count]) for part in (whole, limited) for count in ("kills", "reads", "promised")) > 0
    assert int(whole["misses"]) == 0 < int(limited["evicted"])
