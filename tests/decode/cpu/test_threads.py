"""Helper threads of torch: those of a thread that makes no passes any more must not slow down another's."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest
import torch

from decode import Engine, Target
from decode.cpu.backend import find_openmp
from decode.devices.backend import find_backend
from tests.support.models import tiny

CPU = torch.device("cpu")
needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or not find_openmp() or torch.get_num_threads() < 2, reason="torch has no helpers of GNU's"
)


def count_threads(expected: int = 0) -> int:
    """Of this process, soon: a thread ends a little later than it is told to."""
    for _ in range(100):
        if (found := len(os.listdir("/proc/self/task"))) == expected:
            break
        time.sleep(0.01 * bool(expected))
    return found


def use_helpers() -> None:
    torch.ones(1 << 22).exp_()


@needs_openmp
def test_helpers_end_and_come_again() -> None:
    find_backend(CPU).release_threads()
    before = count_threads()
    use_helpers()
    more = before + torch.get_num_threads() - 1
    assert count_threads(more) == more
    find_backend(CPU).release_threads()
    assert count_threads(before) == before
    use_helpers()
    assert count_threads(more) == more


@needs_openmp
def test_a_thread_that_waits_has_no_helpers() -> None:
    """Else steps in the engine's own thread take twice as long."""
    engine = Engine(Target(tiny("llama")), None)

    async def answer() -> None:
        use_helpers()
        before = count_threads()
        await engine.step_async()
        expected = before + 1 - (torch.get_num_threads() - 1)  # the engine's thread has come, which has no work
        assert count_threads(expected) <= expected

    engine.add([5, 6, 7], max_new_tokens=4)
    asyncio.run(answer())
    engine.close()
