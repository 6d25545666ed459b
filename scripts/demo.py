"""See speculative decoding at work: an answer streams in, then the methods are compared in a table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial

from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import Proposer, Target, stream
from decode.models.default_model import default_model
from decode.text import encode
from proposers import load_proposer
from scripts.benchmark.methods import NODES, Ask, Measured, ask_loop, ask_peer
from scripts.shared.command import Parser, failing_clearly
from scripts.shared.options import ModelOptions, load_target
from scripts.shared.terminal import format_chunk, has_colour

MAX_NEW_TOKENS = 64
ROUNDS = 2  # the methods take turns; the median counts
METHODS = ("none", "ngram", "merged", "auto")
PROMPTS = (
    "Summarize this in two sentences: The lighthouse on Gull Rock was built in 1871 after three ships were lost in one "
    "winter. The lighthouse was lit by oil until 1932, when it was given electric light. Its last keeper, Anna "
    "Lindqvist, left the lighthouse on Gull Rock in 1986, and since then a computer on the mainland has turned the "
    "light on at dusk and off at dawn.",
    "Repeat this list of colours, then add two more: red, orange, yellow, green, blue, indigo, violet.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs does the farmer have after 4 weeks?",
)
NOTES = """\
tau: tokens per forward pass of the model. hf: Hugging Face's generate. none: this project's plain decoding; compared
with hf it shows the speed of the engine, and the other lines compared with it show the speed of speculation. ngram:
draft tokens copied from the text itself. merged: one tree from copies and from the model's earlier predictions, no
training. auto: merged, and a head that was trained for this model."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="draftless demo", description=__doc__)
    parser.parse_args(argv)
    with failing_clearly(parser):
        print("loading the model", file=sys.stderr)
        target = load_target(ModelOptions())
        target.warm_up()
        proposers = {name: load_proposer(name, target) for name in METHODS}
        print(f"\n> {PROMPTS[0]}\n")
        for chunk in stream(target, PROMPTS[:1], proposers[METHODS[-1]], max_new_tokens=MAX_NEW_TOKENS):
            print(format_chunk(chunk, has_colour(sys.stdout)), end="", flush=True)
        caption = f"(coloured: draft tokens of {METHODS[-1]}, accepted by the model)\n"
        print("\n" + caption * has_colour(sys.stdout))
        print("comparing with Hugging Face's generate", file=sys.stderr)
        stock = AutoModelForCausalLM.from_pretrained(str(default_model()), dtype=target.dtype).to(target.device)
        table = compare(target, stock, proposers)
        print(f"{table}\n\n{NOTES}")


def compare(target: Target, stock: PreTrainedModel, proposers: Mapping[str, Proposer]) -> str:
    """A table of speeds on `PROMPTS`, and whether the tokens are those of transformers' greedy generate."""
    prompts = [encode(prompt, target.tokenizer, chat=True) for prompt in PROMPTS]
    asks: dict[str, Ask] = {"hf": partial(ask_peer, stock, {"do_sample": False})}
    asks |= {name: partial(ask_loop, target, proposer, 0.0, NODES) for name, proposer in proposers.items()}
    asks["hf"](prompts[:1], 0, MAX_NEW_TOKENS)  # the first call is slow; ours are warm already
    rounds: dict[str, list[list[Measured]]] = {name: [] for name in asks}
    for _ in range(ROUNDS):
        for name, ask in asks.items():
            rounds[name].append([ask([prompt], 0, MAX_NEW_TOKENS) for prompt in prompts])
    lines = [f"{'method':8}{'tau':>7}{'tokens/s':>10}{'against hf':>12}   same text"]
    speeds: dict[str, float] = {}
    for name, measured in rounds.items():
        texts = [answers.answers for answers in measured[0]]
        tokens, steps = sum(len(text) for (text,) in texts), sum(len(answers.added[0]) for answers in measured[0])
        speeds[name] = tokens / statistics.median(sum(answers.seconds for answers in each) for each in measured)
        same = "yes" if texts == [answers.answers for answers in rounds["hf"][0]] else "no"
        ratio = speeds[name] / speeds["hf"]
        lines.append(f"{name:8}{tokens / steps:7.2f}{speeds[name]:10.1f}{ratio:11.2f}x   {same}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
