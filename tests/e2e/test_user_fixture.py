"""The fixture that users' tests take a real pool from, as they would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TEST = """
import lenspool

def test_sync(lenspool_pool):
    assert lenspool_pool.capture("Hello there", "resid_post.-1")["resid_post.-1"].shape[1] == 576

async def test_async(lenspool_pool):
    async with lenspool.Client(lenspool_pool.url) as client:
        assert (await client.capture("Hello there", "resid_post.-1")).cached
"""


def test_a_project_with_the_plugin(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["lenspool.testing.plugin"]\n')
    (tmp_path / "test_theirs.py").write_text(TEST)
    settings = f"[pytest]\nasyncio_mode = auto\nlenspool_model = {smollm2}\n"
    (tmp_path / "pytest.ini").write_text(settings)

    def pytest_run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=dict(os.environ), timeout=500)

    answer = pytest_run()
    assert answer.returncode == 0 and "2 passed" in answer.stdout, answer.stdout + answer.stderr
    (tmp_path / "pytest.ini").write_text(settings.partition("lenspool_model")[0])
    os.environ.pop("LENSPOOL_TEST_MODEL", None)
    answer = pytest_run()
    assert answer.returncode != 0 and "LENSPOOL_TEST_MODEL" in answer.stdout
