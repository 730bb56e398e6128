"""docs/parity.md, from what `tests.families.parity` measures."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from lenspool.vocabulary import HOOK_POINTS

_HEAD = """# Parity with transformers

Written by `make parity`: do not edit. For each family a tiny random checkpoint ({layers} layers, grouped queries,
windows shorter than the prompts, soft-caps, sinks) runs in vLLM {vllm} on {platform} in float32 and in transformers
{transformers} (eager attention), torch {torch}. Every hook is captured at every position of three prompts of 21, 13 and
6 tokens, of which the longest run in chunks, mixed with edited requests and a generation, and compared with module
hooks in transformers.

Numbers are the largest relative L2 error over prompts and layers; - where a hook is not served. *edit*: the largest
error of stream, pattern, logits and the hook itself after an edit at any editable hook. *generation*: of all hooks over
a prompt and its greedy continuation. *norm*: how far the ratio of norms is from 1.

"""


def report(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: hooks by families."""
    from tests.families.checkpoints import LAYERS

    ran = {name: result for name, result in found.items() if "error" not in result}
    versions = next(iter(ran.values()))["versions"]
    lines = _HEAD.format(
        layers=LAYERS,
        vllm=versions["vllm"],
        torch=versions["torch"],
        platform=versions["platform"].upper(),
        transformers=importlib.metadata.version("transformers"),
    ).splitlines()
    lines += ["| hook | " + " | ".join(ran) + " |", "|---" * (len(ran) + 1) + "|"]
    for point in HOOK_POINTS:
        cells = [f"{r['errors'][point.name]:.0e}" if point.name in r["errors"] else "-" for r in ran.values()]
        lines.append(f"| `{point.name.replace('blocks.{layer}.', '')}` | " + " | ".join(cells) + " |")
    for title, worst in (
        ("edit", lambda r: max(r["edits"].values())),
        ("generation", lambda r: max(r["generation"].values())),
        ("norm", lambda r: max(r["ratios"].values())),
    ):
        lines.append(f"| *{title}* | " + " | ".join(f"{worst(r):.0e}" for r in ran.values()) + " |")
    lines += ["", "## What is not served, and why", "", "| family | hooks | reason |", "|---|---|---|"]
    for name, result in ran.items():
        reasons: dict[str, list[str]] = {}
        for point in HOOK_POINTS:
            if point.name in result["refusals"] and "the name means" not in result["refusals"][point.name]:
                some = " (in some layers)" if point.name in result["errors"] else ""
                hook = f"`{point.name.replace('blocks.{layer}.', '')}`{some}"
                reasons.setdefault(result["refusals"][point.name], []).append(hook)
        for reason, hooks in reasons.items():
            lines.append(f"| {name} | {', '.join(hooks)} | {reason} |")
    for name, result in found.items():
        if "error" in result:
            lines += ["", f"{name} did not run:", "", "```", result["error"].strip(), "```"]
    return "\n".join(lines) + "\n"
