"""Hooks that grow with the square of the prompt are refused by their bytes, before anything runs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lenspool import InvalidJob
from lenspool.card import HookInfo
from lenspool_cache import Run, Store
from lenspool_worker.derived import DerivedHooks, Pattern
from lenspool_worker.request_checks import RequestChecks
from lenspool_worker.requests import CaptureGroup, EngineRequest

HEADS, LENGTH = 32, 4096
PATTERN = "blocks.0.attn.hook_pattern"


@pytest.fixture
def checks(tmp_path: Path) -> RequestChecks:
    pattern = {"name": PATTERN, "dims": (HEADS, 0), "width": 0, "computed": True, "prefix": True, "editable": False}
    hook = {field.name: pattern.get(field.name) for field in fields(HookInfo)} | pattern
    info = {"vocab_size": 10, "max_model_len": 8192, "dtype": "float32"}
    return RequestChecks([hook], info, Store(tmp_path), text=False)


def request(rows: tuple[int, int]) -> EngineRequest:
    return EngineRequest("job", [1] * LENGTH, (CaptureGroup((PATTERN,), (rows,)),), [], None, Run({}))


def test_a_pattern_that_is_too_large_is_refused_with_its_bytes(checks: RequestChecks) -> None:
    with pytest.raises(InvalidJob, match=str(LENGTH * HEADS * LENGTH * 4)):
        checks.check(request((0, LENGTH)))
    checks.check(request((LENGTH - 16, LENGTH)))


def test_a_pattern_needs_all_earlier_keys() -> None:
    derived = DerivedHooks({PATTERN: Pattern("q", "k", 1, 1, 1.0, None, None, None, scores=False)})
    assert derived.sources([([PATTERN, "q"], [(3, 5)]), (["k"], [(4, 9)])]) == [("q", [(3, 5)]), ("k", [(0, 9)])]
    assert derived.sources([([PATTERN], [(3, None)])]) == [("q", [(3, None)]), ("k", [(0, None)])]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [({}, ""), ({"is_causal": False}, "bidirectional"), ({"use_bidirectional_attention": True}, "bidirectional")],
)
def test_a_model_whose_rows_follow_from_later_tokens_shares_none(
    smollm2: Path, overrides: dict[str, bool], reason: str
) -> None:
    from vllm.config import ModelConfig

    from lenspool_worker.settings import no_prefix_reuse

    found = no_prefix_reuse(ModelConfig(model=str(smollm2), hf_overrides=overrides))
    assert reason in found and bool(reason) == bool(found)
