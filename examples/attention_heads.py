"""Which heads look where: previous-token heads and induction heads (Olsson et al. 2022) of the demo model.

On random tokens, twice over, an induction head looks from a token to the one that followed it the first time.
`python examples/attention_heads.py [PICTURE.png]` starts a pool of its own.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

import lenspool
from lenspool import Client
from lenspool_worker.demo_model import default_folder, prepare

Scores = dict[str, np.ndarray]


async def explore(client: Client, length: int = 24, picture: Path | None = None) -> Scores:
    """Mean attention `[layer, head]` to the token before, and to the one behind the earlier occurrence."""
    card = await client.card()
    half = np.random.default_rng(0).integers(100, card.vocab_size, length)
    result = await client.capture(np.tile(half, 2), "pattern.*")
    patterns = np.stack([result[f"pattern.{layer}"] for layer in range(card.n_layers)])  # [layer, head, query, key]
    scores = {
        "previous token": np.diagonal(patterns, -1, axis1=2, axis2=3).mean(-1),
        "induction": np.diagonal(patterns, 1 - length, axis1=2, axis2=3)[..., 1:].mean(-1),
    }
    for what, found in scores.items():
        for place in np.argsort(-found, axis=None)[:3]:
            layer, head = np.unravel_index(place, found.shape)
            print(f"{what}: layer {layer}, head {head} gives {found[layer, head]:.0%} of its attention there")
    if picture is not None:
        layer, head = np.unravel_index(int(np.argmax(scores["induction"])), scores["induction"].shape)
        result.plot.attention(int(layer), head=int(head)).figure.savefig(picture, dpi=150)
    return scores


async def main(picture: Path | None, folder: Path = Path(".demo/store")) -> None:
    async with lenspool.connect_local(prepare(default_folder()), store=folder) as client:
        await explore(client, picture=picture)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
