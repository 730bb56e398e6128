"""Activation patching on the demo model: where does SmolLM2 keep who gives to whom?

`python examples/patching.py [FOLDER]` starts a pool of its own and leaves four pictures in the folder, and everything
that was computed in its store: the second time nothing runs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import lenspool
from lenspool import Client
from lenspool.recipes import causal_trace, head_ablation, logit_diff, patching_sweep, steering_vector
from lenspool_worker.demo_model import default_folder, prepare

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
FACT = "The Eiffel Tower is in the city of"
LIKES = ["I love this book", "This was a wonderful day", "The food is delicious"]
DISLIKES = ["I hate this book", "This was a terrible day", "The food is disgusting"]


async def pictures(client: Client, folder: Path) -> None:
    names = logit_diff(" Mary", " John")
    every_third = [f"resid_pre.{layer}" for layer in range(0, 30, 3)]
    sweep = await patching_sweep(client, CLEAN, CORRUPT, every_third, metric=names)
    heads = await head_ablation(client, CLEAN, names, layers=range(12, 24))
    mlps = [f"blocks.{layer}.hook_mlp_out" for layer in range(0, 30, 3)]
    trace = await causal_trace(client, FACT, "Eiffel Tower", " Paris", mlps, window=3, samples=3)
    mood = await steering_vector(client, LIKES, DISLIKES, "resid_post.14")
    print(sweep, heads, trace, mood, sep="\n")
    axes = {"patching": sweep.plot(), "heads": heads.plot(), "trace": trace.plot(), "mood": mood.plot()}
    for name, ax in axes.items():
        ax.figure.canvas.print_figure(folder / f"{name}.png", dpi=150)
    print("heads that matter most, (layer, head, effect):", heads.top(3))
    edit = mood.steer(relative=0.25)
    print((await client.generate("The film was", max_tokens=20, interventions=edit)).text)


async def main(folder: Path) -> None:
    model = prepare(default_folder())
    async with lenspool.connect_local(model, store=folder / "store", engine={"dtype": "float32"}) as client:
        await pictures(client, folder)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".demo/recipes")
    target.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(target))
