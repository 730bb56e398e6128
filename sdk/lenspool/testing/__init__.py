"""For the unit tests of code that uses lenspool: a pool that is only pretended, and (`plugin`) a real one by fixture.

>>> async with lenspool.testing.FakePool().client() as client:  # doctest: +SKIP
...     result = await client.capture("any text", "blocks.*.hook_resid_post")
"""

from lenspool.testing.fake_model import fake_card
from lenspool.testing.fake_pool import FakePool

__all__ = ["FakePool", "fake_card"]
