"""Every hook of every family equals transformers in float32: plain, edited, in chunks, beside others, generating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lenspool.hooks import template
from lenspool.vocabulary import BY_NAME
from lenspool_worker.families.table import FAMILIES
from tests.families.checkpoints import CONFIGS, UNKNOWN

TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of its own finds: vLLM runs inside it."""
    out = tmp_path_factory.mktemp("parity") / "found.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    log = subprocess.run(
        [sys.executable, "-m", "tests.families.parity", str(out)], env=environment, capture_output=True, text=True
    )
    assert log.returncode == 0, log.stderr[-4000:]
    results: dict[str, Any] = json.loads(out.read_text())
    return results


@pytest.fixture(params=CONFIGS)
def result(request: pytest.FixtureRequest, found: dict[str, Any]) -> dict[str, Any]:
    one: dict[str, Any] = found[request.param]
    assert "error" not in one, one["error"]
    return one


def test_every_family_of_the_table_is_tried() -> None:
    assert {family.name for family in FAMILIES} == {name.split(" (")[0] for name in CONFIGS}


def test_hooks_equal_those_of_transformers(result: dict[str, Any]) -> None:
    assert {h: e for h, e in result["errors"].items() if not e <= TOLERANCE} == {}
    assert {h: r for h, r in result["ratios"].items() if not r <= TOLERANCE} == {}


def test_all_that_exists_is_served_and_nothing_else(result: dict[str, Any]) -> None:
    assert set(result["served"]) == set(result["expected"])
    served = {template(name) for name in result["served"]}
    for name in BY_NAME:
        assert (name in served) or result["refusals"][name]


def test_edits_have_the_effect_that_they_have_in_transformers(result: dict[str, Any]) -> None:
    tried = [name for name in result["served"] if not name.startswith("blocks.") or name.startswith("blocks.1.")]
    editable = {name for name in tried if BY_NAME[template(name)].editable}
    assert set(result["edits"]) == editable
    assert {h: e for h, e in result["edits"].items() if not e <= TOLERANCE} == {}


def test_generated_positions_equal_those_of_transformers(result: dict[str, Any]) -> None:
    ours, theirs = result["tokens"]
    assert ours == theirs
    assert {h: e for h, e in result["generation"].items() if not e <= TOLERANCE} == {}


def test_prompts_ran_in_chunks_and_together(result: dict[str, Any]) -> None:
    assert result["stats"]["max_batch"] > 1
    assert result["stats"]["mixed_steps"] > 0


def test_an_unknown_family_is_served_as_far_as_it_fits(found: dict[str, Any]) -> None:
    """Granite multiplies what its modules put out before it adds it to the stream: those hooks are not right there."""
    granite = found[next(iter(UNKNOWN))]
    assert "error" not in granite, granite["error"]
    for name in ("blocks.{layer}.hook_attn_out", "blocks.{layer}.hook_mlp_out"):
        assert "differs from" in granite["refusals"][name]
        assert name not in granite["errors"]
    served = {name: error for name, error in granite["errors"].items() if name != "hook_embed"}
    for name in (
        "hook_resid_pre",
        "hook_resid_post",
        "attn.hook_q",
        "attn.hook_pattern",
        "attn.hook_z",
        "mlp.hook_post",
    ):
        assert served["blocks.{layer}." + name] <= TOLERANCE
    assert {h: e for h, e in served.items() if not e <= TOLERANCE} == {}
