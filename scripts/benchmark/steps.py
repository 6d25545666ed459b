"""Milliseconds of a decoding step with random weights, next to transformers' `generate`: at the sizes of an 8B Llama.

    python -m draftless_commands.benchmark.steps MODE [--context 512] [--rows 1] [--device cuda]

Random weights accept almost no draft token, so this times steps and says nothing of tau. Needs 20 GiB of GPU memory,
and more for long contexts in batches. On a CPU the sizes are tiny: a rehearsal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode import Proposer, Sampling, Target, stream
from decode.cuda.graph import CudaGraphPool
from decode.devices.backend import find_backend
from draftless_commands.benchmark.measurement import clock
from draftless_commands.shared.results import to_markdown
from heads import KINDS, LayerConfig
from proposers import EagleProposer, MergedProposer, NGramProposer


@dataclass(frozen=True)
class Sizes:
    """Those of a Llama and of an EAGLE-3 head for it, and the tokens of an answer."""

    hidden: int
    layers: int
    vocabulary: int
    draft_vocabulary: int
    layer: dict[str, int]
    new_tokens: int


LARGE = Sizes(
    4096, 32, 128256, 32000, {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}, 96
)
TINY = Sizes(64, 4, 512, 64, {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}, 12)


def make_model(sizes: Sizes, device: torch.device) -> LlamaForCausalLM:
    shape = {"num_hidden_layers": sizes.layers, "max_position_embeddings": 1 << 16}
    config = LlamaConfig(hidden_size=sizes.hidden, vocab_size=sizes.vocabulary, **shape, **sizes.layer)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def make_head(sizes: Sizes, device: torch.device) -> torch.nn.Module:
    network, config = KINDS["eagle3"].network, KINDS["eagle3"].config
    layer = LayerConfig(head_dim=sizes.hidden // sizes.layer["num_attention_heads"], **sizes.layer)
    features = (1, sizes.layers // 2, sizes.layers - 1)
    head = network(
        config(sizes.hidden, sizes.vocabulary, layer=layer, draft_size=sizes.draft_vocabulary, features=features)
    )
    head.token_map.copy_(torch.arange(sizes.draft_vocabulary))
    return head.to(device, torch.bfloat16).eval()


def time_transformers(model: LlamaForCausalLM, prompt: list[int], new_tokens: int) -> float:
    """Milliseconds a token of `generate`, without the prompt."""
    ids = torch.tensor([prompt], device=model.device)
    settings = {"attention_mask": torch.ones_like(ids)}

    def run(tokens: int) -> float:
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        return clock(lambda: model.generate(ids, **settings, **limits), model.device)[1]

    run(8)
    return statistics.median(1000 * (run(1 + new_tokens) - run(1)) / new_tokens for _ in range(3))


def time_steps(target: Target, proposer: Proposer | None, prompts: list[list[int]], settings: Any) -> dict[str, Any]:
    """Milliseconds: of a whole first answer, and of a second one its prompts, and its median and longest step.

    Kernels and graphs are made in the first answer; "captures" counts the graphs of the second.
    """
    runs = []
    for _ in range(2):
        ends = [time.perf_counter()]
        with patch.object(CudaGraphPool, "capture", autospec=True, side_effect=CudaGraphPool.capture) as capture:
            for chunk in stream(target, prompts, proposer, batch_size=len(prompts), **settings):
                if chunk.request_id == len(prompts) - 1:
                    ends.append(time.perf_counter())
        runs.append([1000 * (end - begin) for begin, end in pairwise(ends)])
    read, *steps = runs[1]
    return {
        "step": f"{statistics.median(steps):.1f}",
        "longest": f"{max(steps):.1f}",
        "captures": str(capture.call_count),
        "prompts": f"{read:.1f}",
        "first answer": f"{sum(runs[0]):.0f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mode", choices=["off", "packed", "graphs"])
    parser.add_argument("--context", type=int, default=512, help="tokens of prompts (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    sizes = LARGE if find_backend(device).waits else TINY
    model = make_model(sizes, device)
    head = make_head(sizes, device)
    prompts = [torch.randint(10, sizes.vocabulary, (options.context,)).tolist() for _ in range(options.rows)]
    sampled = Sampling(temperature=0.8, top_p=0.9, seed=1)
    cases: dict[str, tuple[Callable[[], Proposer | None], Sampling]] = {
        "none": (lambda: None, Sampling()),
        "none, top-p": (lambda: None, sampled),
        "n-grams, 8 nodes": (lambda: NGramProposer(length=7), Sampling()),
        "merged, 16 nodes": (lambda: MergedProposer(nodes=16), Sampling()),
        "EAGLE-3, 16 nodes": (lambda: EagleProposer(head, nodes=16), Sampling()),
        "EAGLE-3, 16 nodes, top-p": (lambda: EagleProposer(head, nodes=16), sampled),
        "EAGLE-3, 60 nodes": (lambda: EagleProposer(head, nodes=60), Sampling()),
    }
    if options.rows == 1:
        print(f"transformers' generate: {time_transformers(model, prompts[0], sizes.new_tokens):.1f} ms a token")
    target = Target(model, accelerate=options.mode)
    settings = {"stop_ids": [], "text": False, "max_new_tokens": sizes.new_tokens}
    lines: list[list[str]] = []
    for name, (make, sampling) in cases.items():
        found = time_steps(target, make(), prompts, settings | {"sampling": sampling})
        lines = lines or [["ms", *found]]
        lines.append([name, *found.values()])
        print(name, found, file=sys.stderr, flush=True)  # the page shows it if the next case fails
    print(to_markdown(lines))


if __name__ == "__main__":
    main()
