"""The C++ ops, for the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decode.cpu.native_ops import load_native_ops


@pytest.fixture
def ops() -> Iterator[None]:
    """Load the ops; a test may change the number of threads."""
    assert load_native_ops() is None
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
