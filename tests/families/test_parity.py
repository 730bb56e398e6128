"""Every hook of every family equals transformers in float32, in every mode; and keeps to it in bfloat16.

All families run in chunks, beside others, edited and generating; some in the other modes. `make parity` runs the rest.
"""

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
from tests.families.expected import HALF
from tests.families.modes import MODES

# all engines boot in one fixture, one after another
pytestmark = pytest.mark.timeout(1800)

TOLERANCE = 1e-5
HALF_FACTOR, HALF_TOLERANCE = 2.0, 1e-2
SAMPLE: dict[str, tuple[str, ...]] = {
    "chunked": (*CONFIGS, *UNKNOWN),
    "eager": ("Llama",),
    # a pair of tensors as the stream; norms behind; a mixture of experts; vLLM's Transformers backend
    "compiled": ("Llama", "Gemma-2", "Mixtral", "OLMo-2"),
    "decode": ("Llama", "Gemma-2", "gpt-oss", "GPT-2"),
    "preempted": ("Llama", "Gemma-2", "Mixtral", "GPT-NeoX"),
    "prefix cache": ("Llama", "Gemma-2", "gpt-oss", "Falcon"),
    "bfloat16": HALF,
}
EXACT = [(m, family) for m, families in SAMPLE.items() if m != "bfloat16" for family in families if family in CONFIGS]


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a process of its own finds: vLLM runs inside it."""
    out = tmp_path_factory.mktemp("parity") / "found.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    wanted = [f"{mode}:{','.join(families)}" for mode, families in SAMPLE.items()]
    log = subprocess.run(
        [sys.executable, "-m", "tests.families.parity", "--out", str(out), *wanted],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert log.returncode == 0, log.stderr[-4000:]
    results: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return results


def too_large(errors: dict[str, float], limit: float = TOLERANCE) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error <= limit}


@pytest.fixture(params=EXACT, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def result(request: pytest.FixtureRequest, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    mode, family = request.param
    one: dict[str, Any] = found[mode][family]
    assert "error" not in one, one["error"]
    return one


def test_every_family_of_the_table_is_tried() -> None:
    assert {family.name for family in FAMILIES} == {name.split(" (")[0] for name in CONFIGS}
    assert set(SAMPLE) == set(MODES)


def test_hooks_equal_those_of_transformers(result: dict[str, Any]) -> None:
    assert {template(name) for name in result["served"]} == set(result["errors"]) == set(result["ratios"])
    assert too_large(result["errors"]) == too_large(result["ratios"]) == {}


@pytest.mark.parametrize(("mode", "family"), EXACT)
def test_only_the_compiled_model_is_compiled(found: dict[str, dict[str, Any]], mode: str, family: str) -> None:
    assert (found[mode][family]["met"]["compiled_graphs"] > 0) == (mode == "compiled")


def test_hooks_fit_one_another(result: dict[str, Any]) -> None:
    assert len(result["identities"]) >= 5
    assert too_large(result["identities"], 1e-6) == {}
    assert result["identities"]["resid_pre[i+1] = resid_post[i]"] == 0


def test_all_that_exists_is_served_and_nothing_else(result: dict[str, Any]) -> None:
    assert set(result["served"]) == set(result["expected"])
    served = {template(name) for name in result["served"]}
    for name in BY_NAME:
        assert (name in served) or result["refusals"][name]


def test_generated_tokens_are_the_largest_logits_and_those_of_transformers(result: dict[str, Any]) -> None:
    assert result["greedy"]
    for ours, theirs in result["tokens"]:
        assert ours == theirs
    assert any(ours for ours, _ in result["tokens"])


@pytest.mark.parametrize(("mode", "family"), [pair for pair in EXACT if pair[0] in ("chunked", "compiled")])
def test_edits_have_the_effect_that_they_have_in_transformers(
    found: dict[str, dict[str, Any]], mode: str, family: str
) -> None:
    result = found[mode][family]
    tried = [name for name in result["served"] if not name.startswith("blocks.") or name.startswith("blocks.1.")]
    editable = {name for name in tried if BY_NAME[template(name)].editable}
    assert set(result["edits"]) == editable
    assert too_large(result["edits"]) == {}


@pytest.mark.parametrize("family", HALF)
def test_bfloat16_is_no_worse_than_that_of_transformers(found: dict[str, dict[str, Any]], family: str) -> None:
    result = found["bfloat16"][family]
    assert "error" not in result, result["error"]
    assert set(result["half"]) == {template(name) for name in result["served"]}
    assert {h: pair for h, pair in result["half"].items() if not pair[1] <= HALF_FACTOR} == {}
    assert too_large(result["identities"], HALF_TOLERANCE) == {}
    assert result["identities"]["resid_pre[i+1] = resid_post[i]"] == 0


def test_an_unknown_family_is_served_as_far_as_it_fits(found: dict[str, dict[str, Any]]) -> None:
    """Granite multiplies what its modules put out before it adds it to the stream: those hooks are refused."""
    granite = found["chunked"][next(iter(UNKNOWN))]
    assert "error" not in granite, granite["error"]
    for name in ("blocks.{layer}.hook_attn_out", "blocks.{layer}.hook_mlp_out"):
        assert "differs from" in granite["refusals"][name]
        assert name not in granite["errors"]
    # hook_embed is what enters the first block, scaled; the reference reads the embedding module itself
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
    assert too_large(served) == {}


def test_the_report_is_of_all_modes_families_and_hooks() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text()
    for mode in MODES:
        section = page.split(f"## {mode[0].upper()}{mode[1:]}\n" if mode != "bfloat16" else "## bfloat16\n")[1]
        section = section.split("\n## ")[0]
        families = HALF if mode == "bfloat16" else CONFIGS
        assert [name for name in families if f" {name}" not in section] == []
        if mode != "bfloat16":
            hooks = {name.replace("blocks.{layer}.", "") for name in BY_NAME}
            assert [hook for hook in hooks if f"\n| `{hook}` |" not in section] == []
    assert "did not run" not in page
