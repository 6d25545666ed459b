"""The model, the tokenizer and the proposers that most tests of `speculate` use."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decode import Proposer, Target
from tests.support.models import tiny
from tests.support.speculating import MAKERS, make_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module", params=MAKERS)
def proposer(request: pytest.FixtureRequest, model: PreTrainedModel) -> Proposer:
    return MAKERS[request.param](Target(model))
