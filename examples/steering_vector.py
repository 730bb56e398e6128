"""A steering vector: from the difference of two sets of prompts, measured on sentences that it has not seen.

`python examples/steering_vector.py` starts a pool of its own; everything is stored, so the second time is quick.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

import lenspool
from lenspool import Client
from lenspool.recipes import steering_vector
from lenspool_worker.demo_model import default_folder, prepare

LIKES = ["I love this book", "This was a wonderful day", "The food is delicious", "What a beautiful song"]
DISLIKES = ["I hate this book", "This was a terrible day", "The food is disgusting", "What an ugly song"]
UNSEEN = [("The hotel was excellent", "The hotel was awful"), ("She is a kind person", "She is a cruel person")]
HOOK = "resid_post.14"


async def explore(client: Client, max_tokens: int = 20) -> dict[str, float]:
    """Make the vector; tell unseen sentences apart by it; steer a continuation both ways."""
    mood = await steering_vector(client, LIKES, DISLIKES, HOOK)
    direction = mood.vector / np.linalg.norm(mood.vector)
    gaps = []
    for good, bad in UNSEEN:
        rows = [(await client.capture(text, HOOK, positions="last"))[HOOK][0] for text in (good, bad)]
        gaps.append(float((rows[0] - rows[1]) @ direction))
        print(f"{good!r} is {gaps[-1]:+.2f} further along the direction than {bad!r}")
    for dose in (0.0, 0.3, -0.3):
        edits = [mood.steer(relative=dose)] if dose else []
        generated = await client.generate("The film was", max_tokens=max_tokens, interventions=edits)
        print(f"dose {dose:+.1f}: The film was{generated.text}")
    return {"smallest gap": min(gaps), "norm": mood.norm}


async def main(folder: Path = Path(".demo/store")) -> None:
    async with lenspool.connect_local(prepare(default_folder()), store=folder) as client:
        await explore(client)


if __name__ == "__main__":
    asyncio.run(main())
