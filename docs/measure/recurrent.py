"""What passes and kept states cost a model with a recurrent state, what n-grams gain, and what rounding does.

    python -m docs.measure.recurrent [--rounds N]

For a Qwen3.5 of about 100M random weights in float32 on a CPU. Only its output matrix is made: it repeats a line, as a
trained model does in a table. Rates are thus an upper bound for predictable text.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from decode import Session, Target, Tree, generate
from decode.costs import fill, random_chain, time_pass
from decode.prefill import read_texts
from draftless_commands.benchmark.files import find_commit
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


def repeat_line(model: PreTrainedModel, small: float) -> None:
    """Let a model with random weights repeat `LINE`.

    What layers add to the embeddings is made small. So the final state is nearly the last token's embedding, and the
    output matrix has it as the row of the next token.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            weight.data *= small
    embeddings = model.get_input_embeddings().weight.data
    model.get_output_embeddings().weight.data[[*LINE[1:], LINE[0]]] = embeddings[[*LINE]]
    model.generation_config.eos_token_id = None


def make_target(dtype: torch.dtype = torch.float32, accelerate: str = "auto") -> Target:
    """The model with random weights, always the same, that repeats `LINE`."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    repeat_line(model, 0.01)
    return Target(model, accelerate=accelerate)


@torch.inference_mode()
def time_passes(target: Target, rounds: int) -> dict[str, float]:
    """Median milliseconds of passes over chains, alone and in batches, and of what is done with states before one."""
    sessions = {rows: fill(target.open(rows), CONTEXT) for rows in (1, 2, 4)}
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for rows, session in sessions.items():
            states, trees = session.states, {count: random_chain(count, rows, target) for count in NODES}
            for count, tree in trees.items():
                times.setdefault(f"{rows} x {count} nodes", []).append(time_pass(session, tree))
                states.forget()
            states.given = [[5, 6, 7, 8]] * rows
            times.setdefault(f"{rows} x 4 nodes after 4 given", []).append(time_pass(session, trees[4]))
            states.forget()
            states.given = [[] for _ in range(rows)]
            times.setdefault(f"{rows} x keeping states", []).append(time_begin(session))
            for layer in states.layers:
                layer._replaced.clear()  # as if passes wrote to the states
            times.setdefault(f"{rows} x copying states", []).append(time_begin(session))
            session.verify(trees[4])  # which learns again that they do not
            states.forget()
    return {name: round(1000 * median(each), 3) for name, each in times.items()}


def time_begin(session: Session) -> float:
    begun = perf_counter()
    session.states.begin(Tree.chain([[5, 6]] * len(session.lengths)), 0, None)
    seconds = perf_counter() - begun
    session.states.forget()
    return seconds


def count_state_bytes(target: Target) -> int:
    session = target.open(1)
    read_texts(session, [[5, 6, 7]])
    return session.count_state_bytes(0)


def time_text(target: Target, rounds: int) -> dict[str, float]:
    """Tokens per second after a table of repeated lines: methods and batches take turns. All texts are equal."""
    target.warm_up(4)
    rates: dict[str, list[float]] = {}
    texts, tau = set[tuple[int, ...]](), 0.0
    for _ in range(rounds):
        for name, proposer, rows in (("plain", None, 1), ("ngram", NGramProposer(), 1), ("plain, 4 rows", None, 4)):
            begun = perf_counter()
            answers = generate(target, [[*LINE] * 3] * rows, proposer, max_new_tokens=NEW_TOKENS)
            rates.setdefault(name, []).append(rows * NEW_TOKENS / (perf_counter() - begun))
            texts |= {tuple(answer.tokens) for answer in answers}
            tau = answers[0].stats.tau if name == "ngram" else tau
    assert len(texts) == 1
    return {name: round(median(each), 2) for name, each in rates.items()} | {"tau": tau}


@torch.inference_mode()
def compare_rules(dtype: torch.dtype) -> dict[str, float]:
    """The logits of four nodes in a chain, next to those of four passes over one node, over 24 chains."""
    target, generator = make_target(dtype, "off"), torch.Generator().manual_seed(0)
    equal, error, same_top = [], 0.0, []
    for _ in range(24):
        text = torch.randint(target.vocabulary, (44,), generator=generator).tolist()
        one, other = target.open(1), target.open(1)
        for session in (one, other):
            read_texts(session, [text[:-4]])
        chain, single = one.verify(Tree.chain([text[-4:]])).logits[0], []
        for token in text[-4:]:
            single.append(other.verify(Tree.chain([[token]])).logits[0, 0])
            other.keep([[0]])
        alone = torch.stack(single)
        equal.append(float((chain == alone).float().mean()))
        same_top.append(float((chain.argmax(-1) == alone.argmax(-1)).float().mean()))
        error = max(error, float((chain - alone).abs().max() / alone.float().std()))
    return {"equal bits": sum(equal) / 24, "largest error": error, "same top token": sum(same_top) / 24}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    target = make_target()
    weights = sum(each.numel() for each in AutoModelForCausalLM.from_config(target.config).parameters())
    found = {"commit": find_commit(), "weights": weights, "state bytes": count_state_bytes(target)}
    found |= {"milliseconds": time_passes(target, args.rounds), "text": time_text(target, args.rounds)}
    rules = {str(dtype): compare_rules(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    found["chain and single nodes"] = rules
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
