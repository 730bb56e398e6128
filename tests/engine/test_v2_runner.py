"""vLLM's two model runners, V1 and V2, and V1 with asynchronous scheduling, give the same rows: in chunks, mixed with
decode, preempted, edited, ended by a token.

V2 is what a GPU gets; here its kernels are interpreted. Each runs in a process of its own, without AsyncLLM.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.engine import v2_process
from tests.engine.asking import relative
from tests.engine.oracle import Edit, Oracle

BLOCKS = 8
TOLERANCE = 1e-5
MODES = ("V1", "V2", "async")


def run(runner: str, model: Path, folder: Path) -> dict[str, np.ndarray]:
    out = folder / f"{runner}.npz"
    command = [sys.executable, "-m", "tests.engine.v2_process", str(model), str(out), runner, str(BLOCKS)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    with np.load(out) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("runners")
    with ThreadPoolExecutor() as pool:
        pending = {runner: pool.submit(run, runner, tiny_llama, folder) for runner in MODES}
        return {runner: future.result() for runner, future in pending.items()}


def test_all_have_met_the_hard_cases(answers: dict[str, dict[str, np.ndarray]]) -> None:
    for runner, arrays in answers.items():
        assert arrays["preemptions"] > 0, runner
        assert arrays["mixed"] > 0, runner


@pytest.mark.parametrize("other", MODES[1:])
def test_all_give_the_same(other: str, answers: dict[str, dict[str, np.ndarray]]) -> None:
    v1, v2 = answers["V1"], answers[other]
    assert set(v1) == set(v2)
    errors = []
    for name, expected in v1.items():
        if name.endswith("/tokens"):
            assert v2[name].tolist() == expected.tolist(), name
        elif "/" in name:
            errors.append(relative(v2[name], expected))
    print(f"\n{other} against V1: worst relative error", max(errors), "of", len(errors))
    assert max(errors) <= TOLERANCE


@pytest.mark.parametrize("runner", MODES)
def test_rows_of_a_runner_are_right(runner: str, answers: dict[str, dict[str, np.ndarray]], tiny_llama: Path) -> None:
    oracle = Oracle(tiny_llama)
    errors = []
    for i, (prompt, _, documents) in enumerate(v2_process.requests(1000)):
        tokens = answers[runner][f"{i}/tokens"].tolist()
        edits: list[Edit] = [(d["hook"], lambda x: x * -2.0, d["ranges"]) for d in documents]
        expected = oracle.run([*prompt, *tokens[:-1]], edits)
        assert expected["unembed.hook_out"].argmax(axis=1)[len(prompt) - 1 :].tolist() == tokens
        errors += [(relative(answers[runner][f"{i}/{name}"], rows), name) for name, rows in expected.items()]
    print(f"\n{runner}: worst relative error", max(errors), "of", len(errors))
    assert max(errors)[0] <= TOLERANCE
