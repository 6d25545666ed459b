"""The target of matchers of the tests' own."""

from __future__ import annotations

import pytest

from decode import Target
from tests.support.grammars import make_bare_target


@pytest.fixture
def target() -> Target:
    return make_bare_target()
