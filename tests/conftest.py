"""Options and fixtures for several tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import decode.cpu.kernel_cache
from tests.models import VOCABULARY, tiny

END = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=1000, help="number of random cases of the losslessness test")
    parser.addoption("--questions", help="a JSONL file in Spec-Bench's format; slow tests answer 60 of its questions")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread: more slow tiny models down, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if request.node.get_closest_marker("slow") else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def kernels(pytestconfig: pytest.Config) -> Iterator[None]:
    """Compile kernels once per checkout, and not into the user's folder."""
    folder = pytestconfig.cache.mkdir("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.cpu.kernel_cache, "kernel_folder", lambda: folder)
        yield


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Saves a tiny Llama model and a tokenizer with a token for each ASCII character. Returns the folder."""
    tokens = ["<pad>", "<s>", "</s>", *map(chr, range(32, 32 + VOCABULARY - 3))]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = "{% for each in messages %}{{ each.role[0] }}:{{ each.content }} {% endfor %}a:"

    def save(**overrides: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        model = tiny("llama", **overrides)
        model.generation_config.eos_token_id = END
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save
