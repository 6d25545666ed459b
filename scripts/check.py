"""Check a head's folder: would vLLM and SGLang serve it as it was trained, and are its draft tokens accepted?"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

from decode.models.loading import DTYPES
from heads.checkpoint import load_head, save_head
from heads.medusa import MedusaHead, widen_medusa
from proposers import HEAD_PROPOSERS
from scripts.serving.comparison import SERVED, serve_head
from scripts.serving.engine import check_engine
from scripts.serving_rules.folder import Engine, error, read_folder
from scripts.serving_rules.report import (
    ENGINES,
    SOURCES,
    Report,
    count_draft_tokens,
    describe_report,
    find_faults,
    write_commands,
)
from scripts.serving_rules.trial import load_trial_proposer, run_trial
from scripts.shared.command import Parser, failing_clearly
from scripts.shared.options import ModelOptions, load_target

EPILOG = f"""\
Each line of the result is a finding: its level (error, warning or note), its engine, its name, and what to do. The
engine is vllm, sglang, both of them, or draftless (loading and drafting here). Then come the commands that serve the
model with the head, and tau, the mean acceptance length on four prompts, next to the one that calibration.json states.
The exit status is 1 if there is an error. With --engine, findings about the other engine are left out.

--serve really serves the head: vLLM answers the four prompts offline, without the head and with it, and Draftless
drafts chains of as many tokens. A table compares texts and the share of draft tokens accepted at each position. vLLM
needs a Python of its own (docs/serving-and-check.md has a recipe for a CPU). --serve does not run SGLang.

{SOURCES}"""


EXPORT_HELP = """for a Medusa head with a draft vocabulary: write a copy with the whole vocabulary, which vLLM 0.32
serves (older versions were not tried), and check the copy. It drafts the same tokens and is larger"""
ENGINE_PYTHON_HELP = "for --serve: a Python that can import vLLM (default: the one that runs this)"


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        if not args.folder.is_dir():
            raise ValueError(f"there is no local folder {args.folder}")
        model = ModelOptions.from_args(args, accelerate="packed")
        python = find_engine(args.serve, args.engine, args.engine_python)
        folder = args.folder if args.export is None else export(args.folder, args.export)
        report = check(folder, model, args.kind, args.engine, decode=not args.no_decode, engine_python=python)
        as_json = json.dumps(asdict(report) | {"ok": report.ok})
        print(as_json if args.json else describe_report(report, args.engine))
    if not report.ok:
        raise SystemExit(1)


def make_parser() -> Parser:
    parser = Parser(prog="check.py", description=__doc__, epilog=EPILOG)
    parser.add_argument("folder", type=Path, metavar="HEAD", help="the head's folder, in any published format")
    parser.add_argument("--model", help="the target: a local folder or a hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--kind", choices=HEAD_PROPOSERS, help="report an error if the head is of another kind")
    parser.add_argument("--engine", choices=ENGINES, help="check for this engine only (default: for both)")
    parser.add_argument("--no-decode", action="store_true", help="check the rules only; do not draft with the head")
    parser.add_argument("--export", type=Path, metavar="DIR", help=EXPORT_HELP)
    parser.add_argument("--serve", action="store_true", help="serve the head in vLLM and compare it with Draftless")
    parser.add_argument("--engine-python", metavar="PATH", help=ENGINE_PYTHON_HELP)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--dtype", choices=DTYPES, help="of the target (default: float32 on a CPU, else the model's)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    return parser


def export(folder: Path, into: Path) -> Path:
    """Write a copy of a Medusa head that needs no token map. Raises ValueError for other heads."""
    head = load_head(folder)
    if not isinstance(head, MedusaHead):
        raise ValueError(f"--export is for Medusa heads; {folder} has a head of kind {head.kind}")
    save_head(widen_medusa(head), into)
    return into


def find_engine(serve: bool, engine: Engine | None, python: str | None) -> str | None:
    """The Python with vLLM, or None without --serve. Raises ValueError for a Python without vLLM, before any work."""
    if not serve and python is not None:
        raise ValueError("--engine-python is for --serve")
    if not serve:
        return None
    if engine == "sglang":
        raise ValueError("--serve serves with vLLM only; leave out --engine sglang")
    python = python or sys.executable
    check_engine(python)
    return python


def check(
    path: Path,
    model: ModelOptions,
    kind: str | None,
    engine: Engine | None,
    decode: bool,
    engine_python: str | None = None,
) -> Report:
    """Apply all rules to the folder, load its head and, with `decode`, draft with it.

    kind: what the head has to be; None accepts every kind. engine: check for this one only; None checks for all.
    engine_python: a Python with vLLM to serve the head in; None serves nothing.
    """
    try:
        folder = read_folder(path)
    except ValueError as fault:  # nothing is left to check, so the model is not loaded
        findings = [error("both", "damaged-folder", str(fault))]
        return Report(str(path), model.model, None, findings, {})
    if engine_python is not None and folder.kind not in SERVED:
        raise ValueError(f"--serve is for heads of kind {', '.join(SERVED)}; {path} has one of kind {folder.kind}")
    target = load_target(model)
    findings = find_faults(folder, target, kind)
    proposer, reasons = load_trial_proposer(path, target)
    if not any(finding.engine == "draftless" for finding in findings):
        findings += reasons
    trial = run_trial(path, target, proposer) if decode and proposer is not None else None
    findings += trial.check() if trial else []
    served = None
    if engine_python is not None and proposer is not None:
        served, faults = serve_head(folder.path, folder.kind, count_draft_tokens(folder), target, engine_python)
        findings += faults
    engines = ENGINES if engine is None else (engine,)
    findings = [finding for finding in findings if finding.engine in (*engines, "both", "draftless")]
    name = model.model or str(target.model.name_or_path)
    commands = write_commands(folder, name, findings)
    commands = {server: command for server, command in commands.items() if server in engines}
    return Report(str(path), name, folder.kind, findings, commands, trial, served)


if __name__ == "__main__":
    main()
