"""The entry point of the group `inspect_ai`; the provider itself is imported when a model is made."""

from __future__ import annotations

from inspect_ai.model import ModelAPI, modelapi


@modelapi(name="lenspool")
def lenspool() -> type[ModelAPI]:
    """The provider of `lenspool/<model>`."""
    from lenspool.integrations.inspect.provider import LenspoolAPI

    return LenspoolAPI
