"""What passes over several tokens cost a mixture of experts on a CPU, what cost curves expect of them, and what drafts
gain.

    python -m docs.measure.mixtures [--rounds N]

For an OLMoE of 446M random weights that bfloat16 holds, computed in float32. Random tokens choose experts of their own,
more than a text's. Its output matrix repeats a line, as a trained model does in a table; other prompts lead to text
that nothing predicts.
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

from decode import Target, generate
from decode.costs import fill, random_chain, time_pass
from docs.measure.recurrent import LINE, repeat_line
from draftless_commands.benchmark.files import find_commit

CONFIG: dict[str, Any] = {
    "vocab_size": 16_000,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 8300,
}
NODES, CONTEXTS, NEW_TOKENS = (1, 2, 4, 8, 16, 32, 64), (256, 2000, 8000), 128


def make_model() -> PreTrainedModel:
    logging.set_verbosity_error()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmoe", **CONFIG), dtype=torch.bfloat16).float()
    repeat_line(model, 1 / 128)
    return model.eval()


@torch.inference_mode()
def time_passes(targets: dict[str, Target], context: int, rounds: int) -> dict[str, dict[int, float]]:
    """Median milliseconds of passes over chains, by target and nodes. Targets take turns."""
    sessions = {name: fill(target.open(1), context) for name, target in targets.items()}
    times: dict[str, dict[int, list[float]]] = {name: {count: [] for count in NODES} for name in targets}
    for _ in range(rounds + 1):
        for count in NODES:
            for name, session in sessions.items():
                times[name][count].append(time_pass(session, random_chain(count, 1, targets[name])))
    return {
        name: {count: round(1000 * median(each[1:]), 2) for count, each in counts.items()}
        for name, counts in times.items()
    }


def find_expected(target: Target, context: int) -> dict[int, float]:
    """The milliseconds that the cost curve expects, by nodes."""
    curve = target.cost_curve(1, context)
    return {count: round(1000 * curve.seconds[0] * curve(count), 2) for count in NODES}


def time_texts(target: Target, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per second with `merged` relative to plain decoding, and tau; plain and `merged` take turns."""
    draw, found = torch.Generator().manual_seed(1), {}
    texts = {"repeats": [*LINE] * 3, "random": torch.randint(target.vocabulary, (120,), generator=draw).tolist()}
    for name, text in texts.items():
        rates: dict[str, list[float]] = {"none": [], "merged": []}
        for _ in range(rounds):
            answers = {}
            for proposer, its in rates.items():
                begun = perf_counter()
                (answers[proposer],) = generate(target, [text], proposer, max_new_tokens=NEW_TOKENS)
                its.append(NEW_TOKENS / (perf_counter() - begun))
            assert answers["none"].tokens == answers["merged"].tokens
        ratios = [merged / none for none, merged in zip(*rates.values(), strict=True)]
        found[name] = {"ratio": round(median(ratios), 3), "tau": round(answers["merged"].stats.tau, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    model = make_model()
    targets = {mode: Target(model, accelerate=mode) for mode in ("off", "packed", "compiled")}
    found: dict[str, Any] = {"commit": find_commit(), "experts": model.config._experts_implementation}
    target = targets["compiled"]
    target.warm_up()
    target.costs.steps.contradicted = True  # curves of an earlier run are measured again
    target.warm_up()
    found["passes"] = {str(context): time_passes(targets, context, args.rounds) for context in CONTEXTS}
    found["expected"] = {str(context): find_expected(target, context) for context in CONTEXTS}
    found["texts"] = time_texts(target, args.rounds)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
