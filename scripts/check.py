"""Check a head's folder: are its draft tokens accepted here, and would vLLM and SGLang serve it as it was trained?"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from decode import Target
from decode.models.default_model import NAME
from decode.models.loading import DTYPES
from draftless_commands.checking.report import check_folder, find_kind_of, list_servers, report_fault
from draftless_commands.checking.serving import check_engine
from draftless_commands.shared.command import Parser, check_output_folder, failing_clearly
from draftless_commands.shared.options import ModelOptions, add_kind_option, load_target
from heads.checkpoint import check_overwrite, load_head, save_head
from heads.medusa import MedusaHead, widen_medusa
from proposers.calibration import FILE, load_calibration

EPILOG = """\
Each finding is a line: its level, its engine (draftless: loading and drafting here), its name, and what to do. Commands
follow that serve the model with the head. At the end come tau, the mean acceptance length on four prompts in trees of
16 nodes, and a verdict: the estimated speed with trees sized by their cost, relative to no drafts. The exit
status is 1 if there is an error. docs/serving-and-check.md explains the findings, and how to install vLLM for --serve
on a CPU."""
EXPORT_HELP = """for a Medusa head with a draft vocabulary or the model's output matrix: write a copy with a matrix for
the whole vocabulary, which vLLM 0.32 serves (older versions were not tried), and check the copy. It drafts the same
tokens and is larger"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="draftless check", description=__doc__, epilog=EPILOG)
    parser.add_argument("folder", type=Path, metavar="HEAD", help="the head's folder, in any published format")
    parser.add_argument("--model", help="the target: a local folder or a hub id (default: SmolLM2-135M-Instruct)")
    add_kind_option(parser)
    parser.add_argument("--no-decode", action="store_true", help="do not draft with the head here")
    parser.add_argument("--export", type=Path, metavar="DIR", help=EXPORT_HELP)
    parser.add_argument("--serve", action="store_true", help="serve the head in vLLM and compare it with Draftless")
    python_help = "for --serve: a Python that can import vLLM (default: the one that runs this)"
    parser.add_argument("--engine-python", metavar="PATH", default=sys.executable, help=python_help)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--dtype", choices=DTYPES, help="of the target (default: float32 on a CPU, else the model's)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        if not args.folder.is_dir():
            raise ValueError(f"there is no local folder {args.folder}")
        if args.serve:
            check_engine(args.engine_python)
        try:
            kind = find_kind_of(args.folder)
        except ValueError as fault:  # before the target is loaded
            report = report_fault(args.folder, args.model or NAME, fault)
        else:
            check_kind(args, kind)
            target = load_target(ModelOptions.from_args(args, accelerate="auto"))
            folder = args.folder if args.export is None else export(args.folder, args.export, target)
            name, python = args.model or str(target.model.name_or_path), args.engine_python if args.serve else None
            report = check_folder(folder, target, name, not args.no_decode, python)
        print(json.dumps(asdict(report) | {"ok": report.ok}) if args.json else report.describe())
    if not report.ok:
        raise SystemExit(1)


def check_kind(args: Namespace, kind: str) -> None:
    """Raise ValueError for options that are not for a head of this kind, and for a bad place for the copy."""
    if args.serve and "vllm" not in list_servers(kind):
        raise ValueError(f"--serve is for heads that vLLM has a class for, not for {kind} heads")
    if args.export is not None:
        if kind != "medusa":
            raise ValueError(f"--export is for Medusa heads; {args.folder} has a head of kind {kind}")
        check_output_folder(args.export, "--export")
        check_overwrite(args.export)


def export(folder: Path, into: Path, target: Target) -> Path:
    """Write a copy of a Medusa head that needs no token map.

    The copy drafts the same tokens, so the head's calibration holds for it.
    """
    head, calibration = load_head(folder, vocab_size=target.vocabulary), load_calibration(folder)
    assert isinstance(head, MedusaHead)
    if head.output == "target":
        head.borrow(target.output_matrix)
    save_head(widen_medusa(head), into)
    (into / FILE).unlink(missing_ok=True)  # of a head that was here before
    if calibration is not None:
        calibration.save(into)
    return into


if __name__ == "__main__":
    main()
