"""See speculative decoding at work: an answer streams in, then the methods are compared in a table."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from textwrap import fill

from decode import Target, stream
from draftless_commands.benchmark.measurement import measure_groups
from draftless_commands.benchmark.methods import make_methods, parse_methods
from draftless_commands.benchmark.questions import ALL, Question
from draftless_commands.benchmark.rows import list_methods, make_rows
from draftless_commands.shared.command import Parser, failing_clearly, measure_line
from draftless_commands.shared.options import ModelOptions, load_target
from draftless_commands.shared.prompts import ask
from draftless_commands.shared.results import to_markdown
from draftless_commands.shared.terminal import format_chunk, has_colour

MAX_NEW_TOKENS, REPEATS = 64, 1
METHODS = "hf,ngram,merged,auto"
PROMPTS = (
    "Summarize this in two sentences: The lighthouse on Gull Rock was built in 1871 after three ships were lost in one "
    "winter. The lighthouse was lit by oil until 1932, when it was given electric light. Its last keeper, Anna "
    "Lindqvist, left the lighthouse on Gull Rock in 1986, and since then a computer on the mainland has turned the "
    "light on at dusk and off at dawn.",
    "Repeat this list of colours, then add two more: red, orange, yellow, green, blue, indigo, violet.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs does the farmer have after 4 weeks?",
)
NOTES = """\
tau: tokens per forward pass of the model, on three prompts, in trees sized by their cost. none: this project's plain
decoding; compared with hf, Hugging Face's generate, it shows the speed of the engine, and the other lines compared with
it show the speed of speculation. ngram: draft tokens copied from the text itself. merged: one tree from copies and from
the model's earlier predictions, no training. auto: merged, and a head that was trained for this model. identical: share
of answers with the tokens of none.
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="draftless demo", description=__doc__)
    parser.parse_args(argv)
    with failing_clearly(parser):
        print("loading the model", file=sys.stderr)
        target = load_target(ModelOptions())
        target.warm_up()
        print(f"\n{fill(f'> {PROMPTS[0]}', measure_line())}\n")
        for chunk in stream(target, PROMPTS[:1], "auto", max_new_tokens=MAX_NEW_TOKENS):
            print(format_chunk(chunk, has_colour(sys.stdout)), end="", flush=True)
        print("\n" + "(coloured: draft tokens of auto, accepted by the model)\n" * has_colour(sys.stdout))
        print("comparing with Hugging Face's generate", file=sys.stderr)
        print(f"{compare(target, ModelOptions())}\n\n{fill(NOTES, measure_line())}")


def compare(target: Target, model: ModelOptions) -> str:
    """A table of speeds on `PROMPTS`. model: the target's options, for transformers' copy of it."""
    options = Namespace(repeats=REPEATS, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0, seed=0)
    methods = make_methods(parse_methods(METHODS), target, model, options.temperature)
    groups = [[Question(number, "demo", ask([prompt], "demo"))] for number, prompt in enumerate(PROMPTS)]
    records = [*measure_groups(methods, groups, 0, target, options)]
    differences = [difference for record in records for difference in record["differences"]]
    rows = [row for row in make_rows(records, differences, [*methods]) if row["category"] == ALL]
    return to_markdown(list_methods(rows))


if __name__ == "__main__":
    main()
