"""The card that the sdk's tests check requests against."""

from tests.sdk.conftest import card  # noqa: F401 - a fixture
