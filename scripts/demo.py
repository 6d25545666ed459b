"""See speculative decoding at work: an answer streams in, then the methods are compared in a table."""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports ends without a traceback

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import Proposer, Target, generate, stream
from decode.models.default_model import default_model
from decode.text import encode
from proposers import HeadProposer, load_proposer
from proposers.load import DRAFT_LAYERS
from scripts.shared.command import Parser, check_writable, failing_clearly
from scripts.shared.options import ModelOptions, load_target
from scripts.shared.terminal import colour_pieces, format_chunk, has_colour
from scripts.shared.terminal_picture import draw_terminal

MAX_NEW_TOKENS = 64
ROUNDS = 2  # the methods take turns; the median counts
METHODS = ("none", "ngram", "draft")  # and the best head
PROMPTS = (
    "Summarize this in two sentences: The lighthouse on Gull Rock was built in 1871 after three ships were lost in one "
    "winter. The lighthouse was lit by oil until 1932, when it was given electric light. Its last keeper, Anna "
    "Lindqvist, left the lighthouse on Gull Rock in 1986, and since then a computer on the mainland has turned the "
    "light on at dusk and off at dawn.",
    "Repeat this list of colours, then add two more: red, orange, yellow, green, blue, indigo, violet.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs does the farmer have after 4 weeks?",
)
NOTES = f"""\
tau: tokens per forward pass of the model. hf: Hugging Face's generate. none: this project's plain decoding; compared
with hf it shows the speed of the engine, and the other lines compared with it show the speed of speculation. ngram:
draft tokens copied from the text itself. draft: the model's own first {DRAFT_LAYERS} of 30 layers, for lack of a small
sibling; it shows the mechanism and is not faster. Any other last line: a head that was trained for this model."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="demo.py", description=__doc__)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write answer and table as an SVG picture")
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        check_writable(args.svg, "--svg")
        print("loading the model", file=sys.stderr)
        target = load_target(ModelOptions())
        target.warm_up()
        proposers = choose_proposers(target)
        best = list(proposers)[-1]
        print(f"\n> {PROMPTS[0]}\n")
        pieces: list[tuple[str, int | None]] = [(f"> {PROMPTS[0]}\n\n", None)]
        for chunk in stream(target, PROMPTS[:1], proposers[best], max_new_tokens=MAX_NEW_TOKENS):
            print(format_chunk(chunk, has_colour(sys.stdout)), end="", flush=True)
            pieces += colour_pieces(chunk)
        caption = f"(coloured: draft tokens of {best}, accepted by the model)\n"
        print("\n" + caption * has_colour(sys.stdout))
        print("comparing with Hugging Face's generate", file=sys.stderr)
        stock = AutoModelForCausalLM.from_pretrained(str(default_model()), dtype=target.dtype).to(target.device)
        table = compare(target, stock, proposers)
        print(f"{table}\n\n{NOTES}")
        if args.svg is not None:
            draw_terminal([*pieces, (f"\n\n{caption}\n{table}", None)], args.svg)


def choose_proposers(target: Target) -> dict[str, Proposer]:
    """The compared proposers by name: `METHODS` and, last, the best one for this model, which may be one of them."""
    proposers = {name: load_proposer(name, target) for name in METHODS}
    best = load_proposer("auto", target)
    name = best.head.kind if isinstance(best, HeadProposer) else "ngram"
    proposers.pop(name, None)
    return {**proposers, name: best}


def compare(target: Target, stock: PreTrainedModel, proposers: Mapping[str, Proposer]) -> str:
    """A table of speeds on `PROMPTS`, and whether the tokens are those of transformers' generate."""
    prompts = [encode(prompt, target.tokenizer, chat=True) for prompt in PROMPTS]
    runs: dict[str, Callable[[], tuple[list[list[int]], float]]] = {"hf": lambda: run_stock(stock, prompts)}
    for name, proposer in proposers.items():
        runs[name] = lambda proposer=proposer: run_ours(target, prompts, proposer)
    texts, taus = {}, {}
    run_stock(stock, prompts[:1])  # the first call is slow; ours are warm already
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
    return "\n".join(lines)


def run_ours(target: Target, prompts: list[list[int]], proposer: Proposer) -> tuple[list[list[int]], float]:
    """The answers' tokens, and tau."""
    answers = generate(target, prompts, proposer, max_new_tokens=MAX_NEW_TOKENS, batch_size=1)
    stats = [answer.stats for answer in answers]
    return [answer.tokens for answer in answers], sum(s.tokens for s in stats) / sum(s.steps for s in stats)


def run_stock(model: PreTrainedModel, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """The tokens of transformers' greedy generate, and its tau: 1."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        texts.append(output[0, len(prompt) :].tolist())
    return texts, 1.0


if __name__ == "__main__":
    main()
