"""What speculation costs and brings with a recurrent state: passes over chains, kept states, tokens given again.

    python -m docs.measure.recurrent [--rounds N] [--out FILE]

For a Qwen3.5 of about 100M random weights in float32 on a CPU. Only its output matrix is made: it repeats a line, as a
trained model does in a table. Rates are thus an upper bound for predictable text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from decode import Target, generate
from decode.models.cost_curve import fill, random_chain, time_pass
from decode.models.recurrent import StateSession
from proposers import NGramProposer

CONFIG: dict[str, Any] = {
    "vocab_size": 16_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 24,  # every fourth attends
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}
CONTEXT, NODES, NEW_TOKENS = 256, (1, 4, 8), 128
LINE = range(100, 140)  # the tokens of the line


def make_target() -> Target:
    """The model with random weights, always the same, that repeats `LINE`.

    What layers add to the embeddings is made small. So the final state is nearly the last token's embedding, and the
    output matrix has it as the row of the next token.
    """
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight.data *= 0.01
    embeddings = model.get_input_embeddings().weight.data
    model.get_output_embeddings().weight.data[[*LINE[1:], LINE[0]]] = embeddings[[*LINE]]
    model.generation_config.eos_token_id = None
    return Target(model, accelerate="auto")


@torch.inference_mode()
def time_passes(target: Target, rounds: int) -> dict[str, float]:
    """Median milliseconds: of passes over chains, of one with as many tokens given before it, and of copied states."""
    session = fill(target.open(1), CONTEXT)
    assert isinstance(session, StateSession)
    trees = {count: random_chain(count, 1, target) for count in NODES}
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for count, tree in trees.items():
            times.setdefault(f"{count} nodes", []).append(time_pass(session, tree))
            session.cache.forget()
        session.cache.given = [[5, 6, 7, 8]]
        times.setdefault("4 nodes after 4 given", []).append(time_pass(session, trees[4]))
        session.cache.forget()
        session.cache.given = [[]]
        for name, is_first in (("keeping states", False), ("copying states", True)):
            if is_first:  # what a pass costs that writes to the states in place
                for layer in session.cache.states:
                    layer._replaced.clear()
            begun = perf_counter()
            session.cache.begin(False)
            times.setdefault(name, []).append(perf_counter() - begun)
            session.cache.forget()
            session.verify(trees[4])  # which learns again
            session.cache.forget()
    return {name: 1000 * median(each) for name, each in times.items()}


def count_state_bytes(target: Target) -> int:
    session = target.open(1)
    assert isinstance(session, StateSession)
    session.extend([[5, 6, 7]])
    states = [state for layer in session.cache.states for each in (layer.conv_states, layer.recurrent_states)
              for state in each.values()]  # fmt: skip
    return sum(state.nbytes for state in states if state is not None)


def time_text(target: Target, rounds: int) -> dict[str, float]:
    """Tokens per second of plain decoding and with n-grams, in turns, after a table of repeated lines."""
    prompt = [*LINE] * 3
    target.warm_up()
    rates: dict[str, list[float]] = {"plain": [], "ngram": []}
    texts, tau = [], 0.0
    for _ in range(rounds):
        for name, proposer in (("plain", None), ("ngram", NGramProposer())):
            answer = generate(target, [prompt], proposer, max_new_tokens=NEW_TOKENS)[0]
            rates[name].append(answer.stats.tokens_per_second)
            texts.append(answer.tokens)
            tau = answer.stats.tau
    assert all(text == texts[0] for text in texts)
    return {name: median(each) for name, each in rates.items()} | {"tau": tau}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = make_target()
    weights = sum(each.numel() for each in AutoModelForCausalLM.from_config(target.config).parameters())
    found = {"weights": weights, "state bytes": count_state_bytes(target), "compiled": target.compiled}
    found |= {"milliseconds": time_passes(target, args.rounds), "text": time_text(target, args.rounds)}
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
