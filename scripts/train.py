"""Train a head that guesses what a model says next. The model itself stays as it is, but for --joint."""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from decode import Target
from heads import HEADS
from heads.folder import load_head, save_head
from scripts.options import Parser, at_least, failing_clearly, load_checkpoint
from scripts.train_joint import EPILOG as JOINT_EPILOG
from scripts.train_joint import add_joint_options, join
from scripts.train_plan import print_plan
from scripts.train_plot import plot_training
from scripts.train_validation import Validator
from training.cache import FeatureCache
from training.data import Dataset, load_dataset
from training.lessons import Lessons
from training.losses import LOSSES
from training.objective import HeadObjective
from training.teacher import Teacher
from training.trainer import Schedule, Trainer
from training.vocabulary import choose_tokens

EPILOG = """\
The folder --out becomes the head's: config.json and model.safetensors are the head of the best validation so far, to
be used with --proposer and --head. Beside them lie metrics.jsonl (a line a logged step: step, tokens, loss, the
share of guesses that agree with the model's, by head; and at validations tau) and checkpoint.pt, from which --resume
goes on. Validation decodes prompts that were held out (one in fifty) and counts tokens a forward pass: tau.
"""
GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        schedule = make_schedule(args)
        check_out(args)
        accelerator = make_accelerator(args)
        target = Target(*load_checkpoint(args, args.model, prepare=not args.joint))  # packed layers cannot learn
        dataset = load_dataset(args.data, target.tokenizer, min(args.max_length, target.context), args.validation)
        head = make_head(args, target, dataset)
        settings = describe_settings(args, target, head, schedule)
        objective: Any = make_objective(args, target, head)
        teacher, save_best = Teacher(target, head.features), partial(save_head, head, args.out, torch.bfloat16)
        if args.joint:
            objective, teacher, save_best = join(target, objective, args.lora_rank, args.out, save_best)
        if args.plan:
            print_plan(objective, dataset, schedule, Lessons(dataset.examples, teacher))
            return
        args.out.mkdir(parents=True, exist_ok=True)
        lessons = Lessons(dataset.examples, teacher, fill_cache(args, teacher, dataset, accelerator))
        trainer = Trainer(
            objective,
            dataset,
            lessons,
            Validator(target, head, dataset.prompts),
            save_best,
            schedule,
            args.out,
            accelerator,
            settings,
        )
        trainer.run(resume=args.resume)
        if args.plot is not None and accelerator.is_main_process:
            plot_training(args.out, args.plot)


def make_parser() -> Parser:
    parser = Parser(
        prog="train.py",
        description=__doc__,
        epilog=EPILOG + JOINT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--target", dest="model", metavar="MODEL", help="a local folder or a hub id (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--head", choices=HEADS, required=True, help="what to train")
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help='JSONL files with "prompt" and "response", or "messages", in each line; best of all answers of the model '
        "itself, as distill.py makes them",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder that the head goes to")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument("--init", type=Path, metavar="DIR", help="start from the head in this folder")
    parser.add_argument("--plan", action="store_true", help="print sizes and expected time, and do nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and tau over the tokens seen")
    group = parser.add_argument_group("the head (without --init)")
    group.add_argument("--heads", type=at_least(1), default=4, metavar="N", help="tokens ahead (default: %(default)s)")
    group.add_argument(
        "--layers", type=at_least(1), default=1, metavar="N", help="blocks a head (default: %(default)s)"
    )
    group.add_argument(
        "--draft-vocab",
        type=at_least(1),
        metavar="N",
        help="guess only the N tokens most frequent in the answers (default: the whole vocabulary)",
    )
    group = parser.add_argument_group("training")
    group.add_argument("--loss", choices=LOSSES, default="kl", help="see training/README.md (default: %(default)s)")
    group.add_argument("--epochs", type=at_least(1), default=1, metavar="N", help="default: %(default)s")
    group.add_argument("--max-steps", type=at_least(1), metavar="N", help="stop after so many steps")
    group.add_argument("--batch-tokens", type=at_least(1), default=2048, metavar="N", help="default: %(default)s")
    group.add_argument("--accumulate", type=at_least(1), default=1, metavar="N", help="batches a step (default: 1)")
    group.add_argument("--max-length", type=at_least(2), default=2048, metavar="N", help="cut texts (default: 2048)")
    group.add_argument("--lr", type=float, default=1e-3, metavar="X", help="highest learning rate (default: 0.001)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of order and weights (default: 0)")
    group.add_argument("--save-every", type=at_least(1), default=200, metavar="N", help="steps (default: 200)")
    group.add_argument("--validate-every", type=at_least(1), default=200, metavar="N", help="steps (default: 200)")
    group.add_argument(
        "--patience",
        type=at_least(1),
        default=10,
        metavar="N",
        help="stop after N validations without a better tau (default: 10)",
    )
    group.add_argument(
        "--validation", type=at_least(1), default=16, metavar="N", help="prompts to decode (default: 16)"
    )
    add_joint_options(parser)
    group = parser.add_argument_group("features")
    group.add_argument(
        "--cache", type=Path, metavar="DIR", help="keep the model's features here, for epochs and heads to come"
    )
    group.add_argument("--cache-gib", type=float, default=20.0, metavar="X", help="at most so large (default: 20)")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 where the device is fast at it"
    )
    group.add_argument("--device", help="cpu, cuda, ... (default: a GPU where there is one)")
    parser.set_defaults(device_map=None)
    return parser


def make_schedule(args: argparse.Namespace) -> Schedule:
    return Schedule(
        epochs=args.epochs,
        max_steps=args.max_steps,
        batch_tokens=args.batch_tokens,
        accumulate=args.accumulate,
        lr=args.lr,
        seed=args.seed,
        save_every=args.save_every,
        validate_every=args.validate_every,
        patience=args.patience,
    )


def check_out(args: argparse.Namespace) -> None:
    """Raise ValueError where files would be overwritten, or missing, before anything is loaded."""
    for file in args.data:
        if not file.is_file():
            raise ValueError(f"--data {file}: there is no such file")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file; give a folder")
    if not (args.resume or args.plan) and args.out.is_dir() and any(args.out.iterdir()):
        raise ValueError(f"--out {args.out} is not empty; give --resume to go on there, or another folder")


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    if args.dtype is None:
        fast = (
            torch.cuda.is_bf16_supported()
            if torch.cuda.is_available()
            else torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        args.dtype = "bfloat16" if fast else "float32"
    accelerator = Accelerator(
        cpu=args.device == "cpu",
        mixed_precision="bf16" if args.dtype == "bfloat16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # they never change
    )
    args.device = args.device or str(accelerator.device)
    return accelerator


def make_head(args: argparse.Namespace, target: Target, dataset: Dataset) -> Any:
    """A new head for the target, its vocabulary begun as the target's own; or the one of --init."""
    torch.manual_seed(args.seed)
    network, shape = HEADS[args.head]
    if args.init is not None:
        head = load_head(args.init, torch.float32)
        if not isinstance(head, network):
            raise ValueError(f"--init {args.init} holds a {type(head).__name__}, not a {args.head} head")
        return head
    size, vocab = target.config.hidden_size, target.vocabulary
    draft_size = min(args.draft_vocab or vocab, vocab)
    config = shape(size, vocab, heads=args.heads, layers=args.layers, draft_size=draft_size, **_origin(target))
    head = network(config)
    if draft_size < vocab:
        chosen, _ = choose_tokens(dataset.examples, vocab, draft_size)
        head.token_map.copy_(chosen)
    head.borrow(target.output_matrix)
    return head


def _origin(target: Target) -> dict[str, Any]:
    return {"target_layers": target.config.num_hidden_layers, "target_name": target.model.config.name_or_path or None}


def make_objective(args: argparse.Namespace, target: Target, head: Any) -> HeadObjective:
    embeddings = target.model.get_input_embeddings()
    with torch.no_grad():
        table = embeddings(torch.arange(target.vocabulary, device=target.device))  # scaled, where the model scales
    return HeadObjective(head, args.loss, table)


def describe_settings(args: argparse.Namespace, target: Target, head: Any, schedule: Schedule) -> dict[str, Any]:
    """What a training that is resumed must have been begun with."""
    kept = {name: value for name, value in asdict(schedule).items() if name not in ("save_every", "validate_every")}
    return {
        **kept,
        **describe_features(args, target),
        "head": args.head,
        "shape": asdict(head.config),
        "loss": args.loss,
        "lora_rank": args.lora_rank if args.joint else None,
    }


def describe_features(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What the features of the examples depend on."""
    digest = hashlib.sha256()
    for file in args.data:
        digest.update(file.read_bytes())
    return {
        "target": target.model.config.name_or_path,
        "hidden_size": target.config.hidden_size,
        "data": digest.hexdigest()[:16],
        "max_length": args.max_length,
        "dtype": args.dtype,
    }


def fill_cache(
    args: argparse.Namespace, teacher: Teacher, dataset: Dataset, accelerator: Accelerator
) -> FeatureCache | None:
    """The cache of --cache, with all that fits into it."""
    if args.cache is None:
        return None
    settings = {**describe_features(args, teacher.target), "layers": list(teacher.layers)}
    with accelerator.main_process_first():
        cache = FeatureCache(args.cache, settings)
        if accelerator.is_main_process:
            cache.fill(teacher, dataset.examples, int(args.cache_gib * GIB))
    return cache


if __name__ == "__main__":
    main()
