"""docs/parity.md, from what `tests.families.parity` measures."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

from lenspool.vocabulary import HOOK_POINTS
from tests.families.checkpoints import LAYERS
from tests.families.modes import MODES

Found = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Mode -> family -> result."""

_HEAD = """# Parity with transformers

Written by `make parity`: do not edit. For each family a tiny random checkpoint ({layers} layers, grouped queries,
windows shorter than the prompts, soft-caps, sinks) runs in vLLM {vllm} on {platform} and in transformers {transformers}
(eager attention), torch {torch}, in float32. Every hook is captured at every position of several prompts, which run
together, and compared with module hooks in transformers' float32.

Numbers are the largest relative L2 error over requests and layers; - where a hook is not served.

| mode | what is run |
|---|---|
{modes}
In every mode and family, all generated tokens are transformers' and the largest logits of the captured rows.
"""
_WORST = """
## The worst hook

Of each family in each mode; *norm* is how far the ratio of norms is from 1 in any mode.
"""
_IDENTITIES = """
## Identities

Captured rows against one another, through the checkpoint's own weights in float64: the largest relative L2 error over
families, requests and layers.
"""
_HALF = """
## bfloat16

The same checkpoints, whose weights are bfloat16 numbers, in bfloat16. *error*: of lenspool's rows against transformers'
float32. *own*: of transformers' own bfloat16 run. *factor*: how many times as large ours is at most, of one prompt and
layer (of an own error below half a unit in the last place, that unit's).
"""


def report(found: Found) -> str:
    """Markdown: families, hooks and modes."""
    exact = {mode: families for mode, families in found.items() if mode != "bfloat16"}
    ran = {mode: {f: r for f, r in families.items() if "error" not in r} for mode, families in exact.items()}
    versions = next(iter(next(iter(ran.values())).values()))["versions"]
    head = _HEAD.format(
        layers=LAYERS,
        vllm=versions["vllm"],
        torch=versions["torch"],
        platform=versions["platform"].upper(),
        transformers=importlib.metadata.version("transformers"),
        modes="".join(f"| {mode} | {MODES[mode].meaning} |\n" for mode in exact),
    )
    lines = [*head.splitlines(), *_WORST.splitlines(), "", *_worst(ran)]
    lines += [*_IDENTITIES.splitlines(), "", *_identities(ran)]
    for mode, families in ran.items():
        lines += ["", f"## {mode[0].upper()}{mode[1:]}", "", *_hooks(families)]
    if half := {name: result for name, result in found.get("bfloat16", {}).items() if "error" not in result}:
        lines += [*_HALF.splitlines(), "", *_bfloat16(half)]
    lines += ["", "## What is not served, and why", "", *_refusals(next(iter(ran.values())))]
    for mode, families in found.items():
        for name, result in families.items():
            if "error" in result:
                lines += ["", f"{name} did not run in mode {mode}:", "", "```", result["error"].strip(), "```"]
    return "\n".join(lines) + "\n"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _short(hook: str) -> str:
    return f"`{hook.replace('blocks.{layer}.', '')}`"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"


def _worst(ran: Found) -> list[str]:
    families = list(dict.fromkeys(family for results in ran.values() for family in results))
    rows = []
    for family in families:
        results = [results.get(family) for results in ran.values()]
        cells = []
        for result in results:
            hook = max(result["errors"], key=result["errors"].__getitem__) if result else ""
            cells.append(f"{_number(result['errors'][hook])} {_short(hook)}" if result else "-")
        ratio = max(ratio for result in results if result for ratio in result["ratios"].values())
        rows.append([family, *cells, _number(ratio)])
    return _table(["family", *ran, "*norm*"], rows)


def _identities(ran: Found) -> list[str]:
    names = dict.fromkeys(n for results in ran.values() for result in results.values() for n in result["identities"])
    rows = [
        [
            f"`{name}`",
            *(_number(max(r["identities"].get(name, 0.0) for r in results.values())) for results in ran.values()),
        ]
        for name in names
    ]
    return _table(["identity", *ran], rows)


def _hooks(families: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        [_short(point.name), *(_number(r["errors"].get(point.name)) for r in families.values())]
        for point in HOOK_POINTS
    ]
    if any(r["edits"] for r in families.values()):
        rows.append(["*edits*", *(_number(max(r["edits"].values())) for r in families.values())])
        return [
            *_table(["hook", *families], rows),
            "",
            "*edits*: of stream, pattern, logits and the hook itself, after an edit at any editable hook.",
        ]
    return _table(["hook", *families], rows)


def _bfloat16(families: Mapping[str, Mapping[str, Any]]) -> list[str]:
    head = [f"{name}: {column}" for name in families for column in ("error", "own", "factor")]
    rows = []
    for point in HOOK_POINTS:
        cells = []
        for result in families.values():
            own, factor = result["half"].get(point.name, (None, 0.0))
            cells += [_number(result["errors"].get(point.name)), _number(own), "-" if own is None else f"{factor:.2f}"]
        if set(cells) != {"-"}:
            rows.append([_short(point.name), *cells])
    names = dict.fromkeys(name for result in families.values() for name in result["identities"])
    for name in names:
        rows.append(
            [f"`{name}`", *(c for r in families.values() for c in (_number(r["identities"].get(name)), "", ""))]
        )
    return _table(["hook or identity", *head], rows)


def _refusals(families: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for name, result in families.items():
        reasons: dict[str, list[str]] = {}
        for point in HOOK_POINTS:
            if point.name in result["refusals"] and "the name means" not in result["refusals"][point.name]:
                some = " (in some layers)" if point.name in result["errors"] else ""
                reasons.setdefault(result["refusals"][point.name], []).append(_short(point.name) + some)
        rows += [[name, ", ".join(hooks), reason] for reason, hooks in reasons.items()]
    return _table(["family", "hooks", "reason"], rows)
