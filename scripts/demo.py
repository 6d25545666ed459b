"""See speculative decoding at work: an answer streams in, then plain and speculative decoding stand side by side."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import Proposer, Target, generate, stream
from decode.models.default_model import default_model
from decode.text import encode
from proposers import HeadProposer
from scripts.options import AUTO, DRAFT_LAYERS, Parser, failing_clearly, load_target, make_proposer
from scripts.shared.painting import paints, show

MAX_NEW_TOKENS = 64
ROUNDS = 2  # the methods take turns; the median counts
METHODS = ("none", "ngram", "draft")  # and the best head
OPTIONS = ("model", "dtype", "device", "device_map", "compile", "draft_model", "head")  # all left at their defaults
PROMPTS = (
    "Summarize this in two sentences: The lighthouse on Gull Rock was built in 1871 after three ships were lost in one "
    "winter. The lighthouse was lit by oil until 1932, when it was given electric light. Its last keeper, Anna "
    "Lindqvist, left the lighthouse on Gull Rock in 1986, and since then a computer on the mainland has turned the "
    "light on at dusk and off at dawn.",
    "Repeat this list of colours, then add two more: red, orange, yellow, green, blue, indigo, violet.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs does the farmer have after 4 weeks?",
)
NOTES = f"""\
tau: new tokens per forward pass of the model. none: this project's own loop without guessing; against hf it shows what
packed weights and the KV cache bring, the others against it show what guessing brings. ngram: guesses from the text
itself. draft: the model's own first {DRAFT_LAYERS} of 30 layers, for want of a small sibling; it shows the mechanism
and is no speed-up. The last line, where it is none of these, is a head that was trained for this model."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="demo.py", description=__doc__)
    parser.parse_args(argv)
    with failing_clearly(parser):
        options = argparse.Namespace(**dict.fromkeys(OPTIONS))
        print("loading the model", file=sys.stderr)
        target = load_target(options)
        target.warm_up()
        proposers = choose_proposers(target, options)
        best = [*proposers][-1]
        print(f"\n> {PROMPTS[0]}\n")
        for chunk in stream(target, PROMPTS[:1], proposers[best], max_new_tokens=MAX_NEW_TOKENS):
            print(show(chunk, paints(sys.stdout)), end="", flush=True)
        print("\n" + f"(coloured: guessed by {best} and accepted)\n" * paints(sys.stdout))
        print("comparing with Hugging Face's generate", file=sys.stderr)
        stock = AutoModelForCausalLM.from_pretrained(str(default_model()), dtype=target.dtype).to(target.device)
        print(compare(target, stock, proposers))


def choose_proposers(target: Target, options: argparse.Namespace) -> dict[str, Proposer]:
    """What is compared, by name: `METHODS` and, last, what is best for this model, which may be one of them."""
    proposers = {name: make_proposer(name, target, options) for name in METHODS}
    best = make_proposer(AUTO, target, options)
    name = best.head.kind if isinstance(best, HeadProposer) else "ngram"
    proposers.pop(name, None)
    return {**proposers, name: best}


def compare(target: Target, stock: PreTrainedModel, proposers: Mapping[str, Proposer]) -> str:
    """A table of the methods on `PROMPTS`, in turns; texts are compared with those of transformers' own generate."""
    prompts = [encode(prompt, target.tokenizer, chat=True) for prompt in PROMPTS]
    runs: dict[str, Callable[[], tuple[list[list[int]], float]]] = {"hf": lambda: run_stock(stock, prompts)}
    for name, proposer in proposers.items():
        runs[name] = lambda proposer=proposer: run_ours(target, prompts, proposer)
    texts, taus = {}, {}
    run_stock(stock, prompts[:1])  # a first pass is a slow one; ours have made theirs
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begun = perf_counter()
            texts[name], taus[name] = run()
            seconds[name].append(perf_counter() - begun)
    speeds = {name: sum(map(len, texts[name])) / statistics.median(taken) for name, taken in seconds.items()}
    lines = [f"{'method':8}{'tau':>7}{'tokens/s':>10}{'against hf':>12}   same text"]
    for name in runs:
        same = "yes" if texts[name] == texts["hf"] else "no"
        lines.append(f"{name:8}{taus[name]:7.2f}{speeds[name]:10.1f}{speeds[name] / speeds['hf']:11.2f}x   {same}")
    return "\n".join([*lines, "", NOTES])


def run_ours(target: Target, prompts: list[list[int]], proposer: Proposer) -> tuple[list[list[int]], float]:
    """The answers' tokens, and tau."""
    answers = generate(target, prompts, proposer, max_new_tokens=MAX_NEW_TOKENS, batch_size=1)
    stats = [answer.stats for answer in answers]
    return [answer.tokens for answer in answers], sum(s.tokens for s in stats) / sum(s.steps for s in stats)


def run_stock(model: PreTrainedModel, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """The same from transformers' generate; it makes one token a pass."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        spoken = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        texts.append(spoken[0, len(prompt) :].tolist())
    return texts, 1.0


if __name__ == "__main__":
    main()
