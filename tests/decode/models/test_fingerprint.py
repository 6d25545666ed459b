"""Fingerprints tell other weights, vocabularies and templates apart, and nothing else."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from decode.models.fingerprint import fingerprint_template, fingerprint_vocabulary, fingerprint_weights
from tests.support.models import tiny


def test_weights_count_and_their_dtype_does_not() -> None:
    model = tiny("llama", dtype=torch.float32)
    before = fingerprint_weights(model)
    assert fingerprint_weights(tiny("llama", dtype=torch.float32)) == before
    assert fingerprint_weights(tiny("llama", dtype=torch.float32, seed=1)) != before
    assert fingerprint_weights(model.to(torch.bfloat16)) == before


def test_the_ids_of_tokens_and_the_template_count() -> None:
    def read(template: str | None, **words: int) -> tuple[str, str | None]:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")))
        tokenizer.chat_template = template
        return fingerprint_vocabulary(tokenizer), fingerprint_template(tokenizer)

    before = read("one", a=0, b=1)
    assert read("one", b=1, a=0) == before
    assert read("one", a=1, b=0)[0] != before[0]
    assert before[1] != read("two", a=0, b=1)[1] is not None
    assert read(None, a=0, b=1) == (before[0], None)
