"""Check a head's folder: are its draft tokens accepted here, and would vLLM and SGLang serve it as it was trained?"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from decode import Target
from decode.devices.user_cache import print_notice
from decode.models.adapters import is_adapter
from decode.models.default_model import NAME
from decode.models.loading import DTYPES
from draftless_commands.checking.card import Card, check_card
from draftless_commands.checking.drift import answer_without_adapter, measure_drift
from draftless_commands.checking.report import (
    NEW_TOKENS,
    Report,
    check_folder,
    list_servers,
    report_fault,
)
from draftless_commands.checking.serving import DRAFT_MODEL, check_engine
from draftless_commands.checking.upload import check_upload, upload
from draftless_commands.shared.command import Parser, check_new_folder, check_output_folder, failing_clearly
from draftless_commands.shared.options import ModelOptions, add_kind_option, fetch_checkpoint, load_target
from heads.checkpoint import check_overwrite, find_kind, load_head, save_head
from heads.formats.written_checkpoint import read_checkpoint, write_checkpoint
from heads.medusa import MedusaHead, widen_medusa
from proposers.calibration import FILE, load_calibration
from proposers.draft_models.loading import is_trained_draft

EPILOG = """\
Each finding is a line: its level, its engine (draftless: loading and drafting here), its name, and what to do. Commands
follow that serve the model with the head. At the end come tau, the mean acceptance length on four prompts in trees of
16 nodes, and a verdict: the estimated speed with trees sized by their cost, relative to no drafts. The exit
status is 1 if there is an error. docs/serving-and-check.md explains the findings, and how to install vLLM for --serve
on a CPU."""
EXPORT_HELP = """for a Medusa head with a draft vocabulary or the model's output matrix: write a copy with a matrix for
the whole vocabulary, which vLLM 0.32 serves (older versions were not tried), and check the copy. It drafts the same
tokens and is larger"""
MODEL_HELP = """the target: a local folder or a hub id (default: the model that the head was trained for). Of a peft
adapter's folder, the perplexity of the original's answers before and after is shown too"""
CARD_HELP = """write a model card, HEAD/README.md (with --export: of the copy). A README.md of your own is never
replaced"""
UPLOAD_HELP = """then upload the head to a repository on the Hugging Face Hub: what its users need, and not the
checkpoint of its training"""
RESTORE_HELP = """instead of a head: the checkpoint, folder or hub id, that --model was fine-tuned from. Write a copy of
--model with the MTP module of BASE to --out, for fine-tuned models that were saved without it"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        if args.restore_mtp is not None:
            restore(args)
            return
        if not args.folder.is_dir():
            raise ValueError(f"there is no local folder {args.folder}")
        if args.serve:
            check_engine(args.engine_python)
        elif args.engine_python != sys.executable:
            raise ValueError("--engine-python is for --serve")
        if args.card:
            check_card(args.export or args.folder)
        try:
            kind = DRAFT_MODEL if is_trained_draft(args.folder) else find_kind(args.folder)
        except ValueError as fault:  # before the target is loaded
            report = report_fault(args.folder, args.model or NAME, fault)
        else:
            check_kind(args, kind)
            report = examine(args, kind)
        as_json = asdict(report) | {"tokens": report.tokens, "ok": report.ok}
        print(json.dumps(as_json) if args.json else report.describe())
    if not report.ok:
        raise SystemExit(1)


def make_parser() -> Parser:
    parser = Parser(prog="draftless check", description=__doc__, epilog=EPILOG)
    one = parser.add_mutually_exclusive_group(required=True).add_argument
    one("folder", type=Path, nargs="?", metavar="HEAD", help="the head's folder, in any published format")
    one("--restore-mtp", metavar="BASE", help=RESTORE_HELP)
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--out", type=Path, metavar="DIR", help="for --restore-mtp: a new folder for the copy")
    add_kind_option(parser)
    parser.add_argument("--no-decode", action="store_true", help="do not draft with the head here")
    parser.add_argument("--export", type=Path, metavar="DIR", help=EXPORT_HELP)
    parser.add_argument("--serve", action="store_true", help="serve the head in vLLM and compare it with Draftless")
    python_help = "for --serve: a Python that can import vLLM (default: the one that runs this)"
    parser.add_argument("--engine-python", metavar="PATH", default=sys.executable, help=python_help)
    parser.add_argument("--card", action="store_true", help=CARD_HELP)
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help=UPLOAD_HELP)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--dtype", choices=DTYPES, help="of the target (default: float32 on a CPU, else the model's)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    return parser


def examine(args: Namespace, kind: str) -> Report:
    """Check the head, and the model's answers if the model is an adapter. Write and upload what is asked for."""
    options = ModelOptions.from_args(args, accelerate="auto")
    if kind != DRAFT_MODEL:
        options = options.for_heads([args.folder])
    folder, repository = args.export or args.folder, args.push_to_hub
    if repository is not None:
        check_upload(repository, args.folder if args.export is None else None)
    answers, is_adapted = None, options.model is not None and is_adapter(options.model)
    if is_adapted:
        print_notice("servers need a MODEL with the adapter merged into it")
    if is_adapted and not args.no_decode:
        answers = answer_without_adapter(options, NEW_TOKENS)
    target = load_target(options)
    if args.export is not None:
        export(args.folder, folder, target)
    name, python = options.model or str(target.model.name_or_path), args.engine_python if args.serve else None
    report = check_folder(folder, target, name, not args.no_decode, python)
    if report.kind is None:  # it was not loaded
        return report
    if answers is not None:
        report = replace(report, drift=measure_drift(answers, target))
    if args.card:
        print_notice(f"{Card(folder, args.folder, report, target, options, repository).save()} is written")
    if repository is not None:
        print_notice(f"{folder} is uploaded to {upload(folder, repository)}")
    return report


def check_kind(args: Namespace, kind: str) -> None:
    """Raise ValueError for options that are not for a head of this kind, and for a bad place for the copy."""
    if args.out is not None:
        raise ValueError("--out is for --restore-mtp; a copy of a head is written by --export")
    if args.serve and "vllm" not in list_servers(kind):
        raise ValueError(f"--serve is for heads that vLLM has a class for, not for {kind} heads")
    if args.push_to_hub is not None and kind == DRAFT_MODEL:
        raise ValueError("--push-to-hub is for heads; a draft model is a model of transformers, with its push_to_hub")
    if args.export is not None:
        if kind != "medusa":
            raise ValueError(f"--export is for Medusa heads; {args.folder} has a head of kind {kind}")
        check_output_folder(args.export, "--export")
        check_overwrite(args.export)


def restore(args: Namespace) -> None:
    """Write a copy of a fine-tuned model's checkpoint with its base's MTP module, as --restore-mtp says."""
    if args.model is None or args.out is None:
        raise ValueError("--restore-mtp needs --model, the fine-tuned checkpoint, and --out, a folder for its copy")
    others = args.serve, args.card, args.json, args.no_decode, args.export, args.push_to_hub
    if any((*others, args.kind, args.dtype, args.device)):
        raise ValueError("--restore-mtp takes --model and --out alone; check the copy afterwards")
    check_new_folder(args.out, "--out")
    model, base = (read_checkpoint(fetch_checkpoint(name)) for name in (args.model, args.restore_mtp))
    if model.modules:
        raise ValueError(f"{args.model} has an MTP module already; restoring is for checkpoints that have lost it")
    write_checkpoint(model, base, args.out)
    print(f"{args.out} is {args.model} with the MTP module of {args.restore_mtp}")


def export(folder: Path, into: Path, target: Target) -> None:
    """Write a copy of a Medusa head that needs no token map.

    The copy drafts the same tokens, so the head's calibration holds for it.
    """
    head, calibration = load_head(folder, vocab_size=target.vocabulary), load_calibration(folder)
    assert isinstance(head, MedusaHead)
    if head.output == "target":
        if target.output_bias is not None:
            has = "the output layer has a bias, and those of vLLM's Medusa heads have none"
            raise ValueError(f"--export: {has}; train the head with --output own")
        head.borrow(target.output_matrix)
    save_head(widen_medusa(head), into)
    (into / FILE).unlink(missing_ok=True)  # of a head that was here before
    if calibration is not None:
        calibration.save(into)


if __name__ == "__main__":
    main()
