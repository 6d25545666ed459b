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
from scripts.serving_rules.folder import Engine, error, read_folder
from scripts.serving_rules.report import ENGINES, SOURCES, Report, describe_report, find_faults, write_commands
from scripts.serving_rules.trial import load_trial_proposer, run_trial
from scripts.shared.command import Parser, failing_clearly
from scripts.shared.options import ModelOptions, load_target

EPILOG = f"""\
Each line of the result is a finding: its level (error, warning or note), its engine, its name, and what to do. The
engine is vllm, sglang, both of them, or draftless (loading and drafting here). Then come the commands that serve the
model with the head, and tau, the mean acceptance length on four prompts, next to the one that calibration.json states.
The exit status is 1 if there is an error. With --engine, findings about the other engine are left out.

{SOURCES}"""


EXPORT_HELP = """for a Medusa head with a draft vocabulary: write a copy with the whole vocabulary, which vLLM 0.21 to
0.32 loads, and check the copy. It drafts the same tokens and is larger"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        if not args.folder.is_dir():
            raise ValueError(f"there is no local folder {args.folder}")
        model = ModelOptions.from_args(args, accelerate="packed")
        folder = args.folder if args.export is None else export(args.folder, args.export)
        report = check(folder, model, args.kind, args.engine, decode=not args.no_decode)
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


def check(path: Path, model: ModelOptions, kind: str | None, engine: Engine | None, decode: bool) -> Report:
    """Apply all rules to the folder, load its head and, with `decode`, draft with it.

    kind: what the head has to be; None accepts every kind. engine: check for this one only; None checks for all.
    """
    try:
        folder = read_folder(path)
    except ValueError as fault:  # nothing is left to check, so the model is not loaded
        findings = [error("both", "damaged-folder", str(fault))]
        return Report(str(path), model.model, None, findings, {})
    target = load_target(model)
    findings = find_faults(folder, target, kind)
    proposer, reasons = load_trial_proposer(path, target)
    if not any(finding.engine == "draftless" for finding in findings):
        findings += reasons
    trial = run_trial(path, target, proposer) if decode and proposer is not None else None
    findings += trial.check() if trial else []
    engines = ENGINES if engine is None else (engine,)
    findings = [finding for finding in findings if finding.engine in (*engines, "both", "draftless")]
    name = model.model or str(target.model.name_or_path)
    commands = write_commands(folder, name, findings)
    commands = {server: command for server, command in commands.items() if server in engines}
    return Report(str(path), name, folder.kind, findings, commands, trial)


if __name__ == "__main__":
    main()
