"""Activations by reference: what an eval log holds of them, and how they are opened again.

A reference is the request itself (tokens, hooks, positions, edits by digest, sampling) with the store that has its rows
and the digest of the model's card there. Its size does not depend on the activations'.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lenspool.access import StoreAccess
from lenspool.answer import Desk, result_of
from lenspool.card import ModelCard
from lenspool.client import Client
from lenspool.errors import CacheError
from lenspool.generation import Generation
from lenspool.handle import record_of, request_of
from lenspool.job import Request
from lenspool.terms import Terms
from lenspool_cache import Store
from lenspool_cache.keys import array_digest

KEY = "lenspool"
"""Where a model output's metadata has what this provider says of it."""


async def put_card(desk: Desk, card: ModelCard) -> dict[str, Any]:
    """Leave a card beside the rows, and say where that is: the part of a reference that all of a model share."""
    document = np.frombuffer(json.dumps(card.to_dict(), sort_keys=True).encode(), np.uint8)
    digest = array_digest(document)
    await desk.access.put_array(digest, document)
    path = str(Path(desk.access.store.path).resolve()) if isinstance(desk.access, StoreAccess) else card.store_path
    return {"store": path, "store_id": card.store_id, "card": digest}


def reference(shared: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """The reference of a request."""
    return {**shared, "request": record_of(request)}


def _references(sample: Any) -> Iterator[dict[str, Any]]:
    for event in getattr(sample, "events", None) or []:
        metadata = getattr(getattr(event, "output", None), "metadata", None) or {}
        yield from metadata.get(KEY, {}).get("captures", [])


def load(sample: Any, *, store: str | Path | None = None) -> list[Generation]:
    """Open what was captured in a sample, from the store alone: no pool needs to run.

    Parameters
    ----------
    sample
        Of a log: `inspect_ai.log.read_eval_log(path).samples[i]`.
    store
        Folder of the store, where it is not the one that the log names (moved, mounted elsewhere).

    Returns
    -------
    list[Generation]
        One for each choice of each model call with a capture, in their order: a mapping from hook to rows, opened when
        they are looked at. `tokens` is None, as the tokenizer is the pool's.

    Raises
    ------
    CacheError
        There is no such store, or it has the rows no more; `fetch` computes them again.
    """
    opened: dict[str, Store] = {}
    cards: dict[str, ModelCard] = {}
    results = []
    for entry in _references(sample):
        folder = str(store or entry["store"])
        if folder not in opened:
            opened[folder] = _open(folder, entry["store_id"])
        place = opened[folder]
        try:
            if entry["card"] not in cards:
                document = json.loads(place.get_array(entry["card"]).tobytes())
                cards[entry["card"]] = ModelCard.from_dict(document)
        except KeyError:
            raise CacheError(f"{folder} has no card {entry['card']}; fetch(sample, client) asks the pool") from None
        request = request_of(entry["request"], cards[entry["card"]])
        found = StoreAccess(place).look(request)
        if not found.complete:
            raise CacheError(f"{folder} no longer has {request.run}; fetch(sample, client) computes it again")
        results.append(result_of(request, Generation, found, None, {}, 0.0))
    return results


def _open(folder: str, store_id: str) -> Store:
    if not (Path(folder) / "store.json").is_file():
        raise CacheError(f"there is no store at {folder}: say where it is (store=...), or fetch(sample, client)")
    place = Store(folder, read_only=True)
    if place.id != store_id:
        place.close()
        raise CacheError(f"{folder} is another store than the one that the log refers to")
    return place


async def fetch(sample: Any, client: Client) -> list[Generation]:
    """As `load`, through a running pool: from its store or over Redis, and computed again where it was evicted.

    Raises
    ------
    InvalidJob
        The client's model is another than the sample's.
    """
    card, desk = await client._connect()
    requests = [request_of(entry["request"], card) for entry in _references(sample)]
    answers = (desk.answer(request, Generation, None, Terms("batch")) for request in requests)
    return list(await asyncio.gather(*answers))
