"""Datasets for other libraries: written in their formats, or as objects that they take."""

from lenspool.feeds.arrays import save_safetensors, save_zarr
from lenspool.feeds.buffer import ActivationBuffer
from lenspool.feeds.latents import save_latents
from lenspool.feeds.sae_lens import encoder, save_sae_lens
from lenspool.feeds.vectors import save_parquet

__all__ = [
    "ActivationBuffer",
    "encoder",
    "save_latents",
    "save_parquet",
    "save_sae_lens",
    "save_safetensors",
    "save_zarr",
]
