"""The target of most tests of proposers."""

import pytest

from decode import Target
from tests.support.models import tiny


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))
