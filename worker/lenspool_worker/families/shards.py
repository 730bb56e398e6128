"""How the heads and the hidden layer of a block are spread over the processes of tensor parallelism, by vLLM's layers.

vLLM gives each process neighbouring heads, and neighbouring columns of the hidden layer. Where there are fewer key and
value heads than processes, neighbouring processes have the same one. A block that is laid out otherwise is refused.
"""

from __future__ import annotations

from typing import Any

from lenspool_worker.families.structure import Block, child
from lenspool_worker.parallel import Place, Shard


def head_shards(block: Block, place: Place) -> tuple[Shard | None, Shard | None]:
    """Shards of queries and of keys and values; None where each process has all of them."""
    projection: Any = block.joint or child(block.attention, ("q_proj",))
    if place.size == 1 or _processes(projection) == 1:
        return None, None
    return Shard(place), Shard(place, int(getattr(projection, "num_kv_head_replicas", 1)))


def heads_apart(block: Block, place: Place) -> str | None:
    """Why the heads of a block cannot be put together; None when they can."""
    kernel = block.kernel
    queries, keys = int(kernel.num_heads) * int(kernel.head_size), int(kernel.num_kv_heads) * int(kernel.head_size)
    if block.joint is not None:
        made = [(block.joint, queries + 2 * keys)]
    else:
        projections = (child(block.attention, (name,)) for name in ("q_proj", "k_proj", "v_proj"))
        made = [pair for pair in zip(projections, (queries, keys, keys), strict=True) if pair[0] is not None]
    if _spread_alike(made, block.output, queries, place):
        return None
    return f"the model runs on {place.size} processes, and its heads are not spread over them in a known way"


def hidden_shard(block: Block, place: Place) -> Shard | None:
    """Shard of the MLP's hidden layer; None where each process has all of it."""
    return Shard(place) if place.size > 1 and _processes(block.down) > 1 else None


def hidden_apart(block: Block, place: Place) -> str | None:
    """Why the hidden layer of a block cannot be put together; None when it can."""
    down: Any = block.down
    width = int(down.input_size) // _processes(down)
    made = (block.up, width) if block.gated is None else (block.gated, 2 * width)
    if _spread_alike([made], down, width, place):
        return None
    return f"the model runs on {place.size} processes, and its MLP is not spread over them in a known way"


def _spread_alike(made: list[tuple[Any, int]], reader: Any, width: int, place: Place) -> bool:
    """Whether projections each put out a part of that width, or all a whole, and the next one takes what they make."""
    sizes = {_processes(linear) for linear, _ in made} | ({_processes(reader)} if reader is not None else set())
    if len(sizes) != 1 or not sizes <= {1, place.size}:
        return False
    if sizes == {1}:
        return True
    parts = all(
        not getattr(linear, "gather_output", False) and int(linear.output_size_per_partition) == columns
        for linear, columns in made
    )
    return parts and (reader is None or (reader.input_is_parallel and int(reader.input_size_per_partition) == width))


def _processes(linear: Any) -> int:
    """Over how many processes a vLLM projection is spread."""
    return int(getattr(linear, "tp_size", 1))
