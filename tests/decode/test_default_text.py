"""The accelerated default model generates the same tokens as transformers, with any proposer, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from decode import Sampling, Target, generate
from decode.models.default_model import default_model
from proposers import DraftProposer, NGramProposer

pytestmark = pytest.mark.slow
PROMPTS = [
    "Name three rivers of Europe and say where they end.",
    "Translate to French: The cat sleeps on the warm stone.",
    "Copy this, then continue it: one fish, two fish, red fish, blue fish, one fish, two fish,",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "What is 17 + 26? Think step by step.",
    "Shorten this text: The old mill by the river was built in 1820. The old mill by the river burned in 1901, and the "
    "old mill by the river was rebuilt in 1903.",
]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load()


@pytest.fixture(scope="module")
def prompts(request: pytest.FixtureRequest) -> list[str]:
    """Six prompts, or the first turns of 60 questions spread over the file of `--questions`."""
    file = request.config.getoption("--questions")
    if file is None:
        return PROMPTS
    questions = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    return [questions[number * len(questions) // 60]["turns"][0] for number in range(60)]


def test_greedy_tokens_are_those_of_transformers(target: Target, prompts: list[str]) -> None:
    file = default_model()
    dequantize = GgufConfig(dequantize=True)
    stock = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=dequantize
    )
    expected = None
    for proposer in (None, NGramProposer(), DraftProposer(target, width=2)):
        for batch_size in (1, 4):
            answers = generate(target, prompts, proposer, max_new_tokens=32, batch_size=batch_size)
            if expected is None:
                starts = [torch.tensor([answer.prompt]) for answer in answers]
                generated = [stock.generate(start, max_new_tokens=32, do_sample=False) for start in starts]
                expected = [ids[0, start.shape[1] :].tolist() for ids, start in zip(generated, starts, strict=True)]
            assert [answer.tokens for answer in answers] == expected


def test_the_same_seed_gives_the_same_tokens(target: Target) -> None:
    settings: dict[str, Any] = {"sampling": Sampling(temperature=0.7, top_p=0.9, seed=7), "max_new_tokens": 32}
    plain = generate(target, PROMPTS, None, batch_size=1, **settings)
    for batch_size in (1, 4):
        answers = generate(target, PROMPTS, NGramProposer(), batch_size=batch_size, **settings)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
