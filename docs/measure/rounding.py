"""What rounding a layer's inputs does to the logits of a model with weights in blocks, against float64.

    python -m docs.measure.rounding --data answers.jsonl [--model FILE.gguf] [--tokens N]

Prints, for inputs in float32, in 24 and in 16 bits, the root mean square of a logit's error, and how many positions
have another most likely token than in float64. The positions are those of the training examples that the data makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from decode import Target
from decode.cpu.packed_linear import PackedLinear
from decode.models.loading import load_model
from draftless_commands.benchmark.files import find_commit
from training.data import load_dataset
from training.rendering import Renderer

DIGITS = {"float32": 0, "24 bits": 3, "16 bits": 2}
MOST = 400  # tokens of a text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="conversations, as for training")
    parser.add_argument("--model", help="a GGUF file; the default model if left out")
    parser.add_argument("--tokens", type=int, default=20_000, help="positions that are compared")
    options = parser.parse_args()
    target = Target.load(options.model)
    exact, _ = load_model(options.model, dtype="float64")
    layers = [layer for layer in target.model.modules() if isinstance(layer, PackedLinear) and layer.digits]
    squares, others, positions = dict.fromkeys(DIGITS, 0.0), dict.fromkeys(DIGITS, 0), 0
    renderer = Renderer(target.tokenizer, {}, ends=target.stop_ids)
    examples = load_dataset([options.data], renderer, MOST, prompts=0).examples
    for text in cut([example.tokens for example in examples], options.tokens):
        expected = find_logits(exact, text)
        positions += len(expected)
        for name, digits in DIGITS.items():
            for layer in layers:
                layer.digits = digits
            logits = find_logits(target.model, text)
            squares[name] += float((logits - expected).square().mean(dim=1).sum())
            others[name] += int((logits.argmax(dim=1) != expected.argmax(dim=1)).sum())
    print(f"{positions} positions, commit {find_commit()}; logits of the last text deviate by {expected.std():.1f}")
    for name in DIGITS:
        print(f"{name:<8} error {(squares[name] / positions) ** 0.5:.2e}, other most likely tokens {others[name]}")


def cut(texts: list[tuple[int, ...]], most: int) -> Iterator[list[int]]:
    """Texts of at most so many tokens in all."""
    for text in texts:
        if most <= 0:
            return
        yield list(text[:most])
        most -= len(text)


@torch.inference_mode()
def find_logits(model: torch.nn.Module, text: list[int]) -> Tensor:
    """The logits [T, V] of a text, in float64."""
    found: Tensor = model(torch.tensor([text])).logits[0].double()
    return found


if __name__ == "__main__":
    main()
