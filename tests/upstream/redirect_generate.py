"""A pytest plugin for transformers' own tests: calls of `generate` go on to `custom_generate=speculate`.

It writes a line of JSON for each test to the file that UPSTREAM_REPORT names. With UPSTREAM_CONTROL=1 nothing is
redirected. It also mends what keeps tests of another version of transformers from being imported.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel

from decode import Proposer, Target, speculate
from decode.models.compatibility import CACHE_NAMES
from proposers import DraftProposer, NGramProposer

CONTROL = os.environ.get("UPSTREAM_CONTROL") == "1"
ROOT = Path(__file__).resolve().parents[2]
STOCK_GENERATE = GenerationMixin.generate
CALLS: Counter[str] = Counter()  # of the running test: redirected, compared, different


class Refused(Exception):
    """`speculate` has refused a call by name. pytest counts the test as failed, the report does not."""


def make_proposer(
    model: PreTrainedModel, assistant_model: PreTrainedModel | None, prompt_lookup_num_tokens: int | None
) -> Proposer:
    """What drafts in place of transformers' own ways to draft. Without them, the model itself."""
    if prompt_lookup_num_tokens is not None:
        return NGramProposer(length=prompt_lookup_num_tokens)
    if assistant_model is not None:
        return DraftProposer(Target(assistant_model), depth=2, nodes=3)
    return DraftProposer(Target(model), width=2, depth=2, nodes=5)


def is_redirected(model: PreTrainedModel, settings: dict[str, Any]) -> bool:
    """Whether a call is greedy decoding or sampling with a decoder-only model."""
    config = settings.get("generation_config") or model.generation_config
    beams = settings.get("num_beams") or config.num_beams or 1
    return beams == 1 and not model.config.is_encoder_decoder and "custom_generate" not in settings


@functools.wraps(STOCK_GENERATE)
def generate(self: PreTrainedModel, *args: Any, **settings: Any) -> Any:
    if not is_redirected(self, settings):
        return STOCK_GENERATE(self, *args, **settings)
    CALLS["redirected"] += 1
    own = {name: settings.pop(name, None) for name in ("assistant_model", "prompt_lookup_num_tokens")}
    expected = None
    if not any(settings.get(name) is not None for name in CACHE_NAMES) and settings.get("do_sample") is False:
        expected = STOCK_GENERATE(self, *args, **settings)
    try:
        proposer = make_proposer(self, **own)
        result = STOCK_GENERATE(self, *args, **settings, custom_generate=speculate, proposer=proposer)
    except ValueError as error:
        if is_refusal(error):
            raise Refused(str(error)) from error
        raise
    if expected is not None:
        CALLS["compared"] += 1
        CALLS["different"] += tokens_of(expected) != tokens_of(result)
    return result


def is_refusal(error: ValueError) -> bool:
    """Whether this project has raised an error, and not transformers."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    return frames is not None and Path(frames.tb_frame.f_code.co_filename).is_relative_to(ROOT / "decode")


def tokens_of(result: Any) -> list[list[int]]:
    return (result if isinstance(result, torch.Tensor) else result.sequences).tolist()


# What tests of another version need


def run_body(*args: Any, **settings: Any) -> Any:
    """In place of `is_flaky`: a bare `@is_flaky` makes a test that runs nothing."""
    return args[0] if args and callable(args[0]) else lambda test: test


def mend_transformers() -> None:
    transformers.testing_utils.is_flaky = run_body
    for module, name in (("deepgemm", "_get_nvcc_version"), ("tensor_parallel", "_get_parameter_tp_plan")):
        loaded = __import__(f"transformers.integrations.{module}", fromlist=[name])
        if not hasattr(loaded, name):
            setattr(loaded, name, lambda *args, **settings: None)
    for module, name in (("test_pipeline_mixin", "PipelineTesterMixin"), ("test_fsdp_mixin", "FSDPTesterMixin")):
        stub = ModuleType(f"tests.{module}")
        setattr(stub, name, type(name, (), {}))
        sys.modules[stub.__name__] = stub


def pytest_configure() -> None:
    import transformers.testing_utils  # noqa: F401

    mend_transformers()
    if not CONTROL:
        GenerationMixin.generate = generate  # type: ignore[method-assign]


# The report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if call.when == "setup":
        CALLS.clear()
    refusal = find_refusal(call.excinfo.value if call.excinfo else None)
    if call.when == "call" or report.outcome == "skipped":
        outcome = "refused" if refusal else "different" if CALLS["different"] else report.outcome
        reason = refusal or (str(call.excinfo.value).strip().splitlines() or [""])[0][:300] if call.excinfo else ""
        line = {"test": item.nodeid, "outcome": outcome, "reason": reason, **CALLS}
        with open(os.environ["UPSTREAM_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return report


def find_refusal(error: BaseException | None) -> str:
    """The message of a refusal that ended a test; "" without one."""
    while error is not None:
        if isinstance(error, Refused):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""
