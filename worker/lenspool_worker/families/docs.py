"""Writes docs/hooks.md from the vocabulary and the families: `python -m lenspool_worker.families.docs FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from lenspool.vocabulary import HOOK_POINTS
from lenspool_worker.families.table import FAMILIES

_HEAD = """# Hooks

Written by `python -m lenspool_worker.families.docs docs/hooks.md`: do not edit.

Names and definitions are TransformerLens's, without its batch dimension. `{layer}` stands for a block's index; negative
ones count from the last. A request may use a name, an alias, a short form (`resid_post.5`) or a pattern
(`blocks.*.attn.hook_z`). `lenspool hooks` lists what a served model has, with the sizes.

| hook | shape | edit | other names | what it is |
|---|---|---|---|---|
"""

_RULES = """
## Rules

- Rows are in the model's dtype; `hook_scale` is float32. `hook_scale` and `hook_normalized` are computed in float32
  from the captured residual stream.
- Values of interventions are flat (`[head * d_head]`) or of the hook's own shape (`[head, d_head]`). An edit shows in
  the capture at the same hook and in everything after it.
- `attn.hook_q` and `attn.hook_k` are the outputs of the projections, with bias: norms of queries and keys, and rotary,
  come after them. `attn.hook_rot_q` and `attn.hook_rot_k` are what the attention kernel takes. Key and value heads are
  not repeated for grouped queries.
- `attn.hook_pattern` and `attn.hook_attn_scores` are computed when the request ends, in float32, from its own queries
  and keys: after edits, with the kernel's scale, soft-cap, window and sinks. They are selected and stored by query
  position; a row has all positions of the run as keys, zero (scores: the dtype's lowest number) where the query does
  not see them. Of a generation, the run is the prompt and all generated tokens but the last.
- `attn.hook_result` is computed from `attn.hook_z`, after its edits.
- `mlp.hook_expert_weights` is what the kernel uses, of the chosen experts only: softmax over all or over the chosen
  ones, renormalized or not, as the family does. float32; `mlp.hook_expert_indices` is int32.
- Patterns, scores and results of one request may take 1 GiB; more is refused with the number of bytes.
- With tensor parallelism each process has a part of the heads and of the MLP's hidden layer: their rows are put
  together, and edits are of whole rows. A block that is spread in an unknown way has them refused, and so has
  `hook_attn_out` or `hook_mlp_out` where the processes' parts are added up only in the stream.

## Families

Which hooks a family does not have, and why, and how far all others are from transformers: docs/parity.md.

| family | architectures | notes |
|---|---|---|
"""

_UNKNOWN = """
Any other decoder is probed by the structure of its modules. What is found under no known name is refused, and so is
what does not fit together in the check at boot (contributions that do not add up to the stream, patterns that do not
give z, norms that do not give their outputs); the rest is served. The model card gives the reason for each.

The check at boot runs for known families too; there, a failure keeps the worker from serving.
"""


def page() -> str:
    """The text of docs/hooks.md."""
    lines = []
    for point in HOOK_POINTS:
        others = ", ".join(f"`{alias}`" for alias in point.aliases)
        shape = ", ".join(point.shape)
        edit = "yes" if point.editable else "no"
        lines.append(f"| `{point.name}` | `[{shape}]` | {edit} | {others} | {point.meaning} |")
    families = [f"| {f.name} | {', '.join(f'`{a}`' for a in f.architectures)} | {f.notes} |" for f in FAMILIES]
    return _HEAD + "\n".join(lines) + "\n" + _RULES + "\n".join(families) + "\n" + _UNKNOWN


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
