"""Fingerprints tell other weights, vocabularies and templates apart, and nothing else."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from decode.models.fingerprint import fingerprint_template, fingerprint_vocabulary, fingerprint_weights
from tests.support.models import tiny


def make_tokenizer(**words: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")))


def test_weights_count_and_their_dtype_does_not() -> None:
    model = tiny("llama", dtype=torch.float32)
    before = fingerprint_weights(model)
    assert fingerprint_weights(tiny("llama", dtype=torch.float32)) == before
    assert fingerprint_weights(tiny("llama", dtype=torch.float32, seed=1)) != before
    assert fingerprint_weights(model.to(torch.bfloat16)) == before


def test_the_ids_of_tokens_count() -> None:
    before = fingerprint_vocabulary(make_tokenizer(a=0, b=1))
    assert fingerprint_vocabulary(make_tokenizer(b=1, a=0)) == before
    assert fingerprint_vocabulary(make_tokenizer(a=1, b=0)) != before


def test_the_template_counts() -> None:
    tokenizer = make_tokenizer(a=0)
    assert fingerprint_template(tokenizer) is None
    tokenizer.chat_template = "one"
    before = fingerprint_template(tokenizer)
    tokenizer.chat_template = "two"
    assert before != fingerprint_template(tokenizer) is not None
