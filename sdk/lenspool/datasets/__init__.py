"""Activations of many prompts: a job that any number of processes do, and a manifest that refers to the store."""

from lenspool.datasets.example import Example
from lenspool.datasets.manifest import Dataset
from lenspool.datasets.mapped import Mapped
from lenspool.datasets.options import DatasetOptions
from lenspool.datasets.statistics import Statistics

__all__ = ["Dataset", "DatasetOptions", "Example", "Mapped", "Statistics"]
