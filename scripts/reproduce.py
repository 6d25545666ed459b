"""Reproduce the published tau of a head or MTP module: a benchmark with its settings, and a comparison at the end."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from draftless_commands import bench
from draftless_commands.benchmark import files
from draftless_commands.benchmark.published import PUBLISHED, Published
from draftless_commands.benchmark.rows import estimate_tau, format_tables
from draftless_commands.shared.command import Parser, at_least, check_writable, failing_clearly
from draftless_commands.shared.options import add_model_options
from draftless_commands.shared.results import to_markdown

NONE_FOUND = "none found"
FILES = ("*.json", "*.safetensors", "*.bin", "*.pt")  # of a head
QUESTIONS_HELP = """the questions of the published measurement, which are not shipped: a .jsonl file of Spec-Bench or
MT-bench, or of any form that draftless bench takes"""
EPILOG = """\
Without NAME, it lists what can be reproduced. With NAME, it loads the model and the head from the hub, or from folders,
and runs draftless bench with the published size of drafts and number of new tokens: greedy, one question at a time.

tau is the number of tokens per forward pass after the prompt's own, bonus token included, as servers count it. Its
95 % interval is bootstrapped over questions. The exit status is 1 if tau differs from the published one by more than
the tolerance. docs/reproduce.md has the sources, and what our measurement does differently."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="draftless reproduce", description=__doc__, epilog=EPILOG)
    parser.add_argument("name", nargs="?", metavar="NAME", choices=PUBLISHED, help="one of the list")
    parser.add_argument("--head", type=Path, metavar="DIR", help="a local copy of the head (--model: of the model)")
    parser.add_argument("--questions", type=Path, metavar="FILE", help=QUESTIONS_HELP)
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="number of questions, from each task alike")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report; continue it if interrupted")
    add_model_options(parser, "the one that was published")
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        if args.name is None:
            if args != parser.parse_args([]):
                raise ValueError(f"give NAME, too: {', '.join(PUBLISHED)}")
            print(list_published())
            return
        if args.questions is None or not args.questions.is_file():  # before anything is fetched
            raise ValueError(f"give --questions FILE, a file with {PUBLISHED[args.name].questions}")
        check_writable(args.json, "--json")
        within, text = reproduce(PUBLISHED[args.name], args)
        print(text)
    if not within:
        raise SystemExit(1)


def list_published() -> str:
    """A table of what can be reproduced."""
    lines = [["name", "model", "head", "tau", "GiB"]]
    for each in PUBLISHED.values():
        head, tau = each.head or "in the model's checkpoint", NONE_FOUND if each.tau is None else f"{each.tau:.2f}"
        lines.append([each.name, each.model, head, tau, f"{each.memory:.0f}"])
    return to_markdown(lines)


def reproduce(published: Published, args: Namespace) -> tuple[bool, str]:
    """Whether tau is within the tolerance, and the report. Raises ValueError as `run_bench` does.

    args: our options. The JSON has what was published, what was measured, and the report of the benchmark.
    """
    settings = make_settings(published, args)
    partial = args.json and args.json.with_name(f"{args.json.name}.partial")
    report = bench.run_bench(settings, partial, published.chat_template)
    method = report["settings"]["methods"][-1]
    tau, *interval = estimate_tau(report["records"], method, published.by_task)
    if args.json is not None:
        measured = {"published": asdict(published), "measured": {"tau": tau, "interval": interval}}
        files.write_report(args.json, measured | report)
        partial.unlink(missing_ok=True)
    within, verdict = compare(published, tau, interval)
    shown = f"measured tau: {tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}] (95 % interval, {published.name})"
    return within, "\n".join([format_tables(report["rows"]), "", shown, verdict])


def make_settings(published: Published, args: Namespace) -> Namespace:
    """The options of `draftless bench` for this measurement. Fetches the head if it is on the hub."""
    head = args.head
    if head is None and published.head is not None:
        head = snapshot_download(published.head, allow_patterns=list(FILES))
    method = published.method + (f",head={Path(head).resolve()}" if head is not None else "")
    preset: dict[str, Any] = {"model": args.model or published.model, "methods": f"none,{method}", "repeats": 1}
    preset |= {"max_new_tokens": published.max_new_tokens, "template_option": published.template}
    return Namespace(**vars(bench.make_parser().parse_args([])) | vars(args) | preset)


def compare(published: Published, tau: float, interval: Sequence[float]) -> tuple[bool, str]:
    """Whether a measured tau is within the tolerance of the published one, and a line that tells."""
    if published.tau is None:
        return True, f"published tau: {NONE_FOUND}, so there is nothing to compare with"
    within = abs(tau - published.tau) <= published.tolerance * published.tau
    verdict = f"{'within' if within else 'not within'} the tolerance of {published.tolerance:.0%}"
    ends = [abs(end - published.tau) <= published.tolerance * published.tau for end in interval]
    if ends != [within] * 2:
        verdict += ", but its interval is too wide to be sure: ask more questions"
    return within, f"published tau: {published.tau:.2f} ({published.source}): {verdict}"


if __name__ == "__main__":
    main()
