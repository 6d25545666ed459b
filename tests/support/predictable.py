"""A tiny model whose text is easy to predict, and answers of it to train a head on."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.support.models import VOCABULARY, tiny

FIRST = 3  # smaller ids are special tokens


@cache
def train_predictable() -> PreTrainedModel:
    """A tiny Llama trained to continue `walk`, in which each token has one successor."""
    torch.manual_seed(0)
    model = tiny("llama", dtype=torch.float32, num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(200):
        starts = torch.randint(FIRST, VOCABULARY, (16,)).tolist()
        tokens = torch.tensor([walk(start, 48) for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def walk(start: int, length: int) -> list[int]:
    """`length` tokens, beginning with `start`."""
    tokens = [start]
    while len(tokens) < length:
        tokens.append(FIRST + (7 * (tokens[-1] - FIRST) + 5) % (VOCABULARY - FIRST))
    return tokens


def write_answers(file: Path, rows: int, seed: int = 0) -> Path:
    """Walks as rows of `prompt` and `response`, spelt for the tokenizer of `save_model`."""
    choose = random.Random(seed)
    lines = []
    for _ in range(rows):
        length = choose.randint(2, 6)
        tokens = walk(choose.randrange(FIRST, VOCABULARY), length + 24)
        text = "".join(chr(32 + token - FIRST) for token in tokens)
        lines.append(json.dumps({"prompt": text[:length], "response": text[length:], "finished": False}))
    file.write_text("\n".join(lines) + "\n")
    return file
