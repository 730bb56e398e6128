"""The layers: cache <- sdk <- worker, and a script's import is light."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "cache/lenspool_cache": {"lenspool_cache"},
    "sdk/lenspool": {"lenspool", "lenspool_cache"},
    "worker/lenspool_worker": {"lenspool", "lenspool_cache", "lenspool_worker"},
}
HEAVY = {"torch", "vllm", "transformers"}


def imported(path: Path) -> set[str]:
    """Top-level names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_dependencies_go_one_way(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        ours = {name for name in imported(path) if name.startswith("lenspool")}
        assert ours <= ALLOWED[folder], f"{path} imports {ours - ALLOWED[folder]}"


def test_a_script_imports_no_engine() -> None:
    code = (
        "import sys, lenspool, lenspool.sync, lenspool.cli, lenspool_cache\n"
        f"print(*({HEAVY!r} & set(sys.modules)), sep=',')"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""


def test_import_takes_no_longer_than_what_it_stands_on() -> None:
    """`import lenspool` against its own dependencies alone, in turn."""
    code = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    base = "h5py, ml_dtypes, numpy, redis.asyncio, rq, tokenizers, jinja2, xxhash"

    def seconds(modules: str) -> float:
        command = [sys.executable, "-c", code.format(modules)]
        return min(float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(3))

    assert seconds("lenspool") < 2 * seconds(base) + 0.1


@pytest.mark.parametrize("package", ["lenspool", "lenspool_cache"])
def test_public_names_are_sorted_and_there(package: str) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_module_imports() -> None:
    pytest.importorskip("vllm", reason="the worker's engine")
    import lenspool
    import lenspool_cache
    import lenspool_worker

    for package in (lenspool_cache, lenspool, lenspool_worker):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not info.name.endswith("__main__"):
                importlib.import_module(info.name)
