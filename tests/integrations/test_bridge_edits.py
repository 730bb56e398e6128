"""`intervene=`: TransformerLens's specifications, with the effect that a hook function has on its torch path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lenspool import add, scale, zero
from lenspool.errors import InvalidJob
from lenspool.integrations.transformer_lens import PoolBridge
from tests.integrations.conftest import TOKENS, far

BAND = 1e-5
WIDTH = 576
VECTOR = torch.linspace(-3, 3, WIDTH)
HOOKS = [
    "embed.hook_out",
    "blocks.5.hook_out",
    "blocks.5.attn.hook_out",
    "blocks.5.mlp.hook_out",
    "ln_final.hook_normalized",
    "blocks.5.attn.q.hook_out",
    "blocks.5.attn.o.hook_in",
    "blocks.5.mlp.out.hook_in",
]
Edit = Callable[[torch.Tensor], torch.Tensor]


def on_torch(oracle: Any, edits: dict[str, Edit]) -> torch.Tensor:
    hooks = [(name, lambda value, hook, edit=edit: edit(value)) for name, edit in edits.items()]
    return oracle.run_with_hooks(TOKENS, fwd_hooks=hooks)


@pytest.mark.parametrize("hook", HOOKS)
def test_ops_equal_hook_functions(hook: str, bridge: PoolBridge, oracle: Any) -> None:
    _, cache = bridge.run_with_cache(TOKENS, names_filter=hook, return_type=None)
    shape = cache[hook].shape[2:]
    vector = torch.linspace(-3, 3, shape.numel())
    cases: list[tuple[dict[str, Any], Edit]] = [
        ({"op": "suppress"}, torch.zeros_like),
        ({"op": "scale", "factor": 2.0}, lambda x: x * 2),
        ({"op": "add", "value": vector}, lambda x: x + vector.reshape(shape)),
        ({"op": "set", "value": 1.5}, lambda x: torch.full_like(x, 1.5)),
    ]
    for spec, edit in cases:
        expected = on_torch(oracle, {hook: edit})
        assert far(bridge(TOKENS, intervene={hook: spec}), expected) < 3 * BAND, spec


def test_edits_by_position(bridge: PoolBridge, oracle: Any) -> None:
    hook = "blocks.5.hook_out"

    def edit(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, [1, 3]] = 1.5
        return x

    spec = {"op": "set", "value": 1.5, "pos": [1, 3]}
    logits, edited = bridge.run_with_cache(TOKENS, names_filter=hook, intervene={hook: spec})
    expected = on_torch(oracle, {hook: edit})
    _, clean = bridge.run_with_cache(TOKENS, names_filter=hook)
    assert far(logits, expected) < BAND
    others = [0, 2, 4, 5]
    assert torch.equal(edited[hook][:, others], clean[hook][:, others])
    assert (edited[hook][:, [1, 3]] == 1.5).all()
    rows = {"op": "set", "value": torch.stack([VECTOR, -VECTOR]), "pos": (3, 1)}
    _, edited = bridge.run_with_cache(TOKENS, names_filter=hook, intervene={hook: rows}, return_type=None)
    assert torch.equal(edited[hook][0, 3], VECTOR) and torch.equal(edited[hook][0, 1], -VECTOR)


def test_captures_are_after_the_edit_and_nothing_stays(bridge: PoolBridge) -> None:
    names = ["blocks.4.hook_out", "blocks.5.hook_out", "blocks.6.hook_in"]
    prompt = torch.tensor([[1, 504, 3575, 282, 4649, 314, 7042, 30]])  # a prompt that no other test runs

    def run(**options: Any) -> Any:
        return bridge.run_with_cache(prompt, names_filter=names, **options)

    logits, clean = run()
    edited_logits, edited = run(intervene={"blocks.5.hook_out": {"op": "scale", "factor": 2}})
    again_logits, again = run()
    assert torch.equal(edited[names[0]], clean[names[0]])
    assert torch.equal(edited[names[1]], 2 * clean[names[1]])
    assert torch.equal(edited[names[2]], edited[names[1]])
    assert not torch.allclose(edited_logits, logits)
    assert torch.equal(again_logits, logits)
    assert all(torch.equal(again[name], clean[name]) for name in names)


def test_a_clean_run_after_an_edited_one_is_clean(bridge: PoolBridge, oracle: Any) -> None:
    """The engine's prefix cache is on, and the edited run comes first; no stored result hides it."""
    prompt = torch.tensor([[1, *range(1000, 1040)]])
    spec = {"blocks.2.hook_out": {"op": "set", "value": 3.0, "pos": list(range(30))}}
    bridge(prompt, intervene=spec)
    assert far(bridge(prompt), oracle(prompt)) < BAND


def test_several_edits_apply_together(bridge: PoolBridge, oracle: Any) -> None:
    edits = {"blocks.3.mlp.hook_out": torch.zeros_like, "blocks.9.hook_out": lambda x: x + VECTOR}
    specs = {"blocks.3.mlp.hook_out": {"op": "suppress"}, "blocks.9.hook_out": {"op": "add", "value": VECTOR.tolist()}}
    assert far(bridge(TOKENS, intervene=specs), on_torch(oracle, edits)) < BAND


def test_names_and_values_in_every_form(bridge: PoolBridge) -> None:
    """Aliases (D9), scalars of any kind (D8), and the pool's own interventions."""
    expected = bridge(TOKENS, intervene={"blocks.5.hook_out": {"op": "scale", "factor": 2.0}})
    for name in ("blocks.5.hook_resid_post", "resid_post.5"):
        for factor in (2, np.float32(2), np.array(2.0), torch.tensor(2.0), torch.tensor(2)):
            assert torch.equal(bridge(TOKENS, intervene={name: {"op": "scale", "factor": factor}}), expected)
    own = scale("blocks.5.hook_out", 2.0)
    for intervene in (own, [own], {"blocks.5.hook_out": own}, {"resid_post.5": [own]}):
        assert torch.equal(bridge(TOKENS, intervene=intervene), expected)
    last = bridge(TOKENS, intervene=[add("resid_post.5", VECTOR, positions=[-1])])
    assert torch.equal(last[:, :-1], bridge(TOKENS)[:, :-1])
    heads = bridge(TOKENS, intervene={"blocks.5.attn.hook_z": zero("z.5", heads=[0])})
    assert not torch.allclose(heads, expected)


def test_suppress_leaves_nothing_of_what_is_not_finite(bridge: PoolBridge) -> None:
    """D6: 0 * Infinity would be NaN."""
    hook = "blocks.5.mlp.hook_out"
    huge = [scale(hook, 1e30), scale(hook, 1e30)]
    _, cache = bridge.run_with_cache(TOKENS, names_filter=hook, intervene={hook: huge}, return_type=None)
    assert not torch.isfinite(cache[hook]).all()
    suppressed = bridge(TOKENS, intervene={hook: [*huge, {"op": "suppress"}]})
    assert torch.equal(suppressed, bridge(TOKENS, intervene={hook: {"op": "suppress"}}))


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"blocks.0.hook_out": lambda x: x}, NotImplementedError, "not callables"),
    ({"blocks.0.hook_out": 3}, ValueError, "must be a dict with 'op' key"),
    ({"blocks.0.hook_out": {"factor": 2}}, ValueError, "must be a dict with 'op' key"),
    ({"blocks.0.hook_out": {"op": "double"}}, ValueError, "Unsupported intervention op 'double'"),
    ({"blocks.0.hook_out": {"op": "scale"}}, ValueError, "op='scale' requires 'factor'"),
    ({"blocks.0.hook_out": {"op": "add"}}, ValueError, "op='add' requires 'value'"),
    ({"blocks.0.hook_out": {"op": "set"}}, ValueError, "op='set' requires 'value'"),
    ({"blocks.0.hook_out": {"op": "suppress", "position": 1}}, ValueError, r"unknown spec key\(s\) \['position'\]"),
    ({"blocks.0.hook_out": {"op": "scale", "factor": "2"}}, ValueError, "factor"),
    ({"blocks.0.hook_out": {"op": "scale", "factor": None}}, ValueError, "factor"),
    ({"blocks.0.hook_out": {"op": "scale", "factor": True}}, ValueError, "factor"),
    ({"blocks.0.hook_out": {"op": "set", "value": True}}, ValueError, "value"),
    ({"blocks.0.hook_out": {"op": "set", "value": None}}, ValueError, "value"),
    ({"blocks.0.hook_out": {"op": "set", "value": float("nan")}}, ValueError, "value"),
    ({"blocks.0.hook_out": {"op": "set", "value": ["a"]}}, ValueError, "value"),
    ({"blocks.0.hook_out": {"op": "add", "value": [1.0] * 5}}, ValueError, "has 5 elements but the hook width is 576"),
    ({"blocks.0.hook_out": {"op": "suppress", "pos": []}}, ValueError, "'pos' is empty"),
    ({"blocks.0.hook_out": {"op": "suppress", "pos": True}}, ValueError, "'pos' must be an int or list of ints"),
    ({"blocks.0.hook_out": {"op": "suppress", "pos": "last"}}, ValueError, "'pos' must be an int or list of ints"),
    ({"blocks.0.hook_out": {"op": "suppress", "pos": -1}}, ValueError, "'pos' must be non-negative"),
    ({"blocks.0.hook_out": {"op": "suppress", "pos": 6}}, ValueError, "is beyond the prompt length 6"),
    ({"blocks.30.hook_out": {"op": "suppress"}}, ValueError, "not in supported_hook_points"),
    ({"blocks.0.nonsense": {"op": "suppress"}}, ValueError, "not in supported_hook_points"),
    ({"blocks.0.attn.hook_pattern": {"op": "suppress"}}, ValueError, "can be captured but not edited"),
    ({"blocks.0.ln2.hook_in": {"op": "suppress"}}, ValueError, "can be captured but not edited"),
    ([{}, {}], ValueError, "2 mappings for 1 rows"),
    (7, ValueError, "interventions of lenspool"),
]


@pytest.mark.parametrize(("intervene", "kind", "message"), REFUSED)
def test_wrong_specifications_are_refused(
    intervene: Any, kind: type[Exception], message: str, bridge: PoolBridge
) -> None:
    """As TransformerLens does (and D7, D8), before anything is queued; the error names hook and key."""
    with pytest.raises(kind, match=message) as caught:
        bridge(TOKENS, intervene=intervene)
    assert isinstance(caught.value, InvalidJob)
    if isinstance(intervene, dict):
        assert next(iter(intervene)) in str(caught.value)
