"""A probe: does SmolLM2 know at the last token whether it is a living thing?

`python examples/probing.py` captures a dataset of sentences, fits a logistic regression on some layers, and tells how
often it is right about words that it has not seen.
"""

from __future__ import annotations

import asyncio

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lenspool
from lenspool import Client
from lenspool_worker.demo_model import default_folder, prepare

LIVING = (
    "dog cat horse cow pig goat sheep chicken duck goose rabbit fox wolf bear lion tiger elephant monkey snake frog "
    "spider bee butterfly eagle owl shark whale dolphin turtle mouse"
)
THINGS = (
    "hammer chair table lamp bottle knife spoon bucket ladder mirror pencil bicycle guitar piano clock camera pillow "
    "blanket basket candle window carpet kettle needle umbrella wallet helmet pistol shovel rope"
)
PLACES = [
    "In the garden I noticed a",
    "My neighbour showed me her",
    "The story is about a",
    "Yesterday we found a small",
]
LAYERS = (0, 6, 12, 18, 24)


async def accuracies(client: Client, places: int = len(PLACES)) -> dict[int, float]:
    """Layer -> share of held-out words' sentences that are told right."""
    words = [(word, living) for living, group in ((1, LIVING), (0, THINGS)) for word in group.split()]
    rows = [
        {"text": f"{place} {word}", "word": word, "living": living}
        for word, living in words
        for place in PLACES[:places]
    ]
    hooks = [f"resid_post.{layer}" for layer in LAYERS]
    dataset = await client.dataset(f"living-things-{places}", rows, hooks, positions="last")
    labels = np.array([example.columns[0]["living"] for example in dataset])
    held_out = np.array([words.index((e.columns[0]["word"], e.columns[0]["living"])) % 3 == 0 for e in dataset])
    found = {}
    for layer, hook in zip(LAYERS, hooks, strict=True):
        vectors = dataset.memmap(hook).array
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        probe.fit(vectors[~held_out], labels[~held_out])
        found[layer] = float(probe.score(vectors[held_out], labels[held_out]))
    return found


async def main() -> None:
    model = prepare(default_folder())
    async with lenspool.connect_local(model, engine={"dtype": "float32"}) as client:
        for layer, accuracy in (await accuracies(client)).items():
            print(f"layer {layer:2}: {accuracy:.0%} of the sentences with words that it has not seen")


if __name__ == "__main__":
    asyncio.run(main())
