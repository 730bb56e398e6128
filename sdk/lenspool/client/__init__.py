"""The async client: `await client.capture(prompt, hooks)`."""

from lenspool.arguments import (
    CaptureOptions,
    GenerateOptions,
    Hooks,
    Interventions,
    ManyOptions,
    Options,
    Prompt,
    SubmitGenerateOptions,
    SubmitOptions,
)
from lenspool.client.many import Many
from lenspool.client.submitting import Submitting
from lenspool.datasets.options import DatasetOptions

__all__ = [
    "CaptureOptions",
    "Client",
    "DatasetOptions",
    "GenerateOptions",
    "Hooks",
    "Interventions",
    "ManyOptions",
    "Options",
    "Prompt",
    "SubmitGenerateOptions",
    "SubmitOptions",
]


class Client(Many, Submitting):
    """A connection to a pool.

    What is not given is looked for in the environment, then in the files that `lenspool.config` names.

    Parameters
    ----------
    url
        Redis: `redis://`, `rediss://` or `unix://`; default `LENSPOOL_REDIS`, then `redis://localhost:6379`.
    model
        Name (or id) of a served model; default `LENSPOOL_MODEL`; may be left out when the pool serves just one.
    store
        Folder of the pool's store; default `LENSPOOL_STORE`, then the folder that the worker names, when that is
        reachable from here. Without a reachable store, or with `store=False`, results ride through Redis.
    inline_limit
        Largest result, in bytes, that may ride through Redis; default 16 MiB.
    patience
        Seconds for which a call waits for a broker or a worker that is gone before it raises `PoolUnavailable`;
        default 120.
    """
