"""lenspool: any activation of any prompt from a shared pool of vLLM workers, and never computed twice.

>>> async with lenspool.connect_local(model_folder) as client:  # doctest: +SKIP
...     result = await client.capture("The Eiffel Tower is in", "blocks.*.hook_resid_post")
...     result["blocks.3.hook_resid_post"].shape
(6, 576)
"""

from lenspool import readouts, recipes
from lenspool.card import HookInfo, ModelCard
from lenspool.client import Client
from lenspool.datasets import Dataset
from lenspool.errors import (
    CacheCorrupt,
    CacheError,
    CacheFull,
    CacheMiss,
    DeadlineExceeded,
    EngineFailed,
    InvalidJob,
    JobCancelled,
    LenspoolError,
    PoolUnavailable,
    QueueFull,
    UnknownHook,
    UnknownModel,
    UnsupportedHook,
    WorkerLost,
)
from lenspool.generation import Generation
from lenspool.handle import Job
from lenspool.interventions import (
    ArrayRef,
    Intervention,
    add,
    clamp,
    interpolate,
    mean_ablate,
    patch,
    project_out,
    scale,
    set_,
    steer,
    suppress,
    swap_rows,
    zero,
)
from lenspool.local import connect_local
from lenspool.logprobs import Logprobs
from lenspool.logs import configure_logging
from lenspool.places import At, Tokens, at
from lenspool.plan import Plan
from lenspool.result import Capture
from lenspool.stacked import Stack, stack
from lenspool.streaming import Delta, TokenStream

__version__ = "0.1.0"

__all__ = [
    "ArrayRef",
    "At",
    "CacheCorrupt",
    "CacheError",
    "CacheFull",
    "CacheMiss",
    "Capture",
    "Client",
    "Dataset",
    "DeadlineExceeded",
    "Delta",
    "EngineFailed",
    "Generation",
    "HookInfo",
    "Intervention",
    "InvalidJob",
    "Job",
    "JobCancelled",
    "LenspoolError",
    "Logprobs",
    "ModelCard",
    "Plan",
    "PoolUnavailable",
    "QueueFull",
    "Stack",
    "TokenStream",
    "Tokens",
    "UnknownHook",
    "UnknownModel",
    "UnsupportedHook",
    "WorkerLost",
    "add",
    "at",
    "clamp",
    "configure_logging",
    "connect_local",
    "interpolate",
    "mean_ablate",
    "patch",
    "project_out",
    "readouts",
    "recipes",
    "scale",
    "set_",
    "stack",
    "steer",
    "suppress",
    "swap_rows",
    "zero",
]
