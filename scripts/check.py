"""Check a head's folder, from anywhere: would vLLM and SGLang serve it as it was trained, and is it any good?"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

from decode.models.loading import DTYPES
from proposers import HEAD_PROPOSERS
from scripts.check_decode import Worth, judge, load_for, measure
from scripts.check_folder import Engine, Finding, read_folder
from scripts.check_rules import find_faults
from scripts.check_serving import SERVERS, list_errors, write_commands
from scripts.shared.command import Parser, failing_clearly
from scripts.shared.options import ModelOptions, load_target

EPILOG = """\
Each line of the result is a finding: error, warning or note; the server that it is about (both: of either, draftless:
of drafting here); its name; what to do. Then come the commands that serve the model with the head, and tau: new
tokens a forward pass on a few prompts, here, beside what the head's card (calibration.json) states. The exit status
is 1 where anything is an error, with --engine only if it is one for that server or for drafting here.

The rules are those of the source of vLLM 0.33 (Medusa: 0.32) and SGLang 0.5.23. Neither server is run.
"""


@dataclass
class Report:
    """What was found in a folder."""

    folder: str
    target: str | None
    kind: str | None
    findings: list[Finding]
    commands: dict[Engine, str]
    decode: Worth | None = None

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        if not args.folder.is_dir():
            raise ValueError(f"there is no such local folder: {args.folder}")
        report = check(args)
        print(json.dumps(asdict(report) | {"ok": report.ok}) if args.json else describe(report, args.engine))
    if not report.ok:
        raise SystemExit(1)


def make_parser() -> Parser:
    parser = Parser(
        prog="check.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the head's folder, in any published layout")
    parser.add_argument(
        "--target", dest="model", metavar="MODEL", help="a local folder or a hub id (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--kind", choices=HEAD_PROPOSERS, help="what the head must be (default: what its tensors say)")
    parser.add_argument("--engine", choices=SERVERS, help="check for this server only (default: for both)")
    parser.add_argument("--no-decode", action="store_true", help="do not draft with it: rules only")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--dtype", choices=DTYPES, help="of the target (default: float32 on a CPU, else the model's)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU where there is one)")
    parser.set_defaults(device_map=None, accelerate="packed")
    return parser


def check(args: argparse.Namespace) -> Report:
    """Hold the folder to all rules, load its head, and draft with it."""
    try:
        folder = read_folder(args.folder)
    except ValueError as error:  # there is nothing to check, so the model is not loaded either
        fault = Finding("error", "both", "damaged-folder", str(error))
        return Report(str(args.folder), args.model, None, [fault], {})
    target = load_target(ModelOptions.from_args(args))
    findings = find_faults(folder, target, args.kind)
    proposer, reasons = load_for(args.folder, target)
    if not any(finding.engine == "draftless" for finding in findings):
        findings += reasons
    worth = None
    if proposer is not None and not args.no_decode:
        worth = measure(args.folder, target, proposer)
        findings += judge(worth)
    if args.engine is not None:
        findings = [finding for finding in findings if finding.engine in (args.engine, "both", "draftless")]
    name = args.model or str(target.model.name_or_path)
    commands = write_commands(folder, name, findings)
    if args.engine is not None:
        commands = {engine: command for engine, command in commands.items() if engine == args.engine}
    return Report(str(args.folder), name, folder.kind, findings, commands, worth)


def describe(report: Report, engine: Engine | None) -> str:
    """The report as lines of text."""
    lines = [f"{each.level:7} {each.engine:9} {each.name}: {each.text}" for each in report.findings]
    lines = [" ".join(line.split("\n")) for line in lines] or ["no findings"]
    if report.kind is not None:
        lines.append("")
        for server in (engine,) if engine else SERVERS:
            lines.append(f"{server}: {report.commands.get(server) or explain(report, server)}")
        lines.append("(checked against the rules of the servers' source, not run)")
    if report.decode is not None:
        lines += ["", describe_worth(report.decode)]
    return "\n".join(lines)


def explain(report: Report, engine: Engine) -> str:
    """Why there is no command for a server."""
    if errors := len(list_errors(report.findings, engine)):
        return f"not before what is wrong is mended ({errors} above)"
    return f"it serves no {report.kind} heads"


def describe_worth(worth: Worth) -> str:
    card = "its card states no acceptance" if worth.expected is None else f"its card states {worth.expected:.2f}"
    return f"tau {worth.tau:.2f} here in {worth.tokens} tokens, greedy, {worth.nodes} nodes; {card}"


if __name__ == "__main__":
    main()
