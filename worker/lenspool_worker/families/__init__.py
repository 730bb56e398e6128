"""Where the hooks of a model are: found through vLLM's own modules, by structure and a small table of families."""

from lenspool_worker.families.install import Installation, Site, UnsupportedModel, install

__all__ = ["Installation", "Site", "UnsupportedModel", "install"]
