"""The logit lens (nostalgebraist 2020): what each layer would say next, and where the answer appears.

`python examples/logit_lens.py [PICTURE.png]` starts a pool of its own. The lens is computed by the worker: ten numbers
per position travel, not a row of the vocabulary.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import lenspool
from lenspool import Client
from lenspool.readouts import lens, rank
from lenspool_worker.demo_model import default_folder, prepare

PROMPT = "The Eiffel Tower is in the city of"
ANSWER = " Paris"


async def explore(client: Client, picture: Path | None = None) -> list[int]:
    """Rank of the answer by layer, from 0 (the likeliest) up."""
    card = await client.card()
    (answer,) = (await client.tokens(ANSWER)).ids
    readouts = [lens(f"resid_post.{layer}", rank([answer])) for layer in range(card.n_layers)]
    result = await client.capture(PROMPT, [*readouts, lens("resid_post.*", k=5)])
    ranks = [int(result[readout][-1, 0]) for readout in readouts]
    for layer, place in enumerate(ranks):
        best = result[lens(f"resid_post.{layer}", k=5)].indices[-1]
        print(f"layer {layer:2}: {ANSWER!r} is number {place + 1:6}; likeliest token id {int(best[0])}")
    if picture is not None:
        result.plot.logit_lens().figure.savefig(picture, dpi=150)
    return ranks


async def main(picture: Path | None, folder: Path = Path(".demo/store")) -> None:
    async with lenspool.connect_local(prepare(default_folder()), store=folder) as client:
        await explore(client, picture)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
