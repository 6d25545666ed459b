"""Milliseconds of a decoding step on a GPU, at the sizes of an 8B Llama with random weights, next to transformers.

    python -m docs.measure.time_gpu_steps [MODE ...] [--contexts 512,4096,32768] [--batch 8]

Random weights accept almost no draft token, so this times steps and says nothing of tau. Needs 20 GiB of GPU memory,
and more for long contexts in batches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode import Proposer, Sampling, Target, stream
from heads import HEADS, LayerConfig
from proposers import EagleProposer, MergedProposer, NGramProposer

MODES = "off", "packed", "graphs"
NEW_TOKENS = 96
SIZES = {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 4096, 128256, 32000


def make_model() -> LlamaForCausalLM:
    shape = {"num_hidden_layers": 32, "max_position_embeddings": 1 << 16}
    config = LlamaConfig(hidden_size=HIDDEN, vocab_size=VOCABULARY, **shape, **SIZES)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def make_head() -> torch.nn.Module:
    network, config = HEADS["eagle3"]
    layer = LayerConfig(head_dim=128, **SIZES)
    head = network(config(HIDDEN, VOCABULARY, layer=layer, draft_size=DRAFT_VOCABULARY, features=(2, 16, 29)))
    head.token_map.copy_(torch.arange(DRAFT_VOCABULARY))
    return head.to("cuda", torch.bfloat16).eval()


def time_transformers(model: LlamaForCausalLM, prompt: list[int]) -> float:
    """Milliseconds a token of `generate`, without the prompt."""
    ids = torch.tensor([prompt], device="cuda")

    def run(tokens: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    run(8)
    return statistics.median(1000 * (run(1 + NEW_TOKENS) - run(1)) / NEW_TOKENS for _ in range(3))


def time_steps(
    target: Target, proposer: Proposer | None, prompt: list[int], rows: int, sampling: Sampling
) -> tuple[float, float, float, float]:
    """Milliseconds: the prompts of a second run; the median and the longest of its steps; and the first run in all.

    Kernels and graphs are made in the first run.
    """
    prompts = [prompt[row:] for row in range(rows)]
    settings = {"max_new_tokens": NEW_TOKENS, "stop_ids": [], "text": False, "sampling": sampling}
    runs = []
    for _ in range(2):
        ends = [time.perf_counter()]
        for chunk in stream(target, prompts, proposer, batch_size=rows, **settings):
            if chunk.request_id == rows - 1:
                ends.append(time.perf_counter())
        runs.append([1000 * (end - begin) for begin, end in pairwise(ends)])
    first, (read, *steps) = sum(runs[0]), runs[1]
    return read, statistics.median(steps), max(steps), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", default=MODES, metavar="MODE", help=f"of {', '.join(MODES)} (default: all)")
    parser.add_argument("--contexts", default="512", help="tokens of prompts (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has it")
    parser.add_argument("--batch", type=int, default=8, help="rows of the last cases (default: %(default)s)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, head = make_model(), make_head()
    greedy, sampled = Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=1)
    rows: dict[str, tuple[Callable[[], Proposer | None], int, Sampling]] = {
        "none": (lambda: None, 1, greedy),
        "none, top-p": (lambda: None, 1, sampled),
        "n-grams, 8 nodes": (lambda: NGramProposer(length=7), 1, greedy),
        "merged, 16 nodes": (lambda: MergedProposer(nodes=16), 1, greedy),
        "EAGLE-3, 16 nodes": (lambda: EagleProposer(head, nodes=16), 1, greedy),
        "EAGLE-3, 60 nodes": (lambda: EagleProposer(head, nodes=60), 1, greedy),
        f"none, batch {options.batch}": (lambda: None, options.batch, greedy),
        f"n-grams, 8 nodes, batch {options.batch}": (lambda: NGramProposer(length=7), options.batch, greedy),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms: prompt, step, longest step, first run")
    for context in map(int, options.contexts.split(",")):
        prompt = torch.randint(10, VOCABULARY, (context,)).tolist()
        print(f"{context} transformers' generate {time_transformers(model, prompt):.1f} ms a token", flush=True)
        for mode in options.modes:
            target = Target(model, accelerate=mode)
            for name, (make, batch, sampling) in rows.items():
                if options.only not in name:
                    continue
                times = time_steps(target, make(), prompt, batch, sampling)
                print(f"{context} {mode:9} {name:26}", *(f"{each:8.1f}" for each in times), flush=True)


if __name__ == "__main__":
    main()
