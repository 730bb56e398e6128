"""TransformerLens on a pool: its own `RemoteBridge`, whose forward passes are the pool's (docs/transformer_lens.md).

>>> from lenspool.integrations.transformer_lens import boot_pool
>>> bridge = boot_pool("path/to/model", "redis://localhost:6379")  # doctest: +SKIP
>>> logits, cache = bridge.run_with_cache("The Eiffel Tower is in")  # doctest: +SKIP

Importing this module imports nothing of TransformerLens; the first use does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lenspool import extras

if TYPE_CHECKING:
    from lenspool.integrations.transformer_lens.bridge import PoolBridge

__all__ = ["PoolBridge", "boot_pool"]


def boot_pool(model_name: str, client: Any = None, **options: Any) -> PoolBridge:
    """A bridge to a pool; see `lenspool.integrations.transformer_lens.boot.boot` for the arguments.

    Raises
    ------
    ImportError
        TransformerLens is not installed; names the extra.
    """
    extras.needed("transformer_lens.model_bridge")
    from lenspool.integrations.transformer_lens.boot import boot

    return boot(model_name, client, **options)


def __getattr__(name: str) -> Any:
    if name == "PoolBridge":
        extras.needed("transformer_lens.model_bridge")
        from lenspool.integrations.transformer_lens.bridge import PoolBridge

        return PoolBridge
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
