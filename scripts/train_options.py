"""The options of train.py, and what can be checked of them before anything is loaded."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import get_args

from heads import HEADS
from heads.vocabulary import Output
from scripts.shared.command import Parser, at_least, check_plot, check_writable
from scripts.train_heads import TTT_STEPS
from scripts.train_joint import EPILOG as JOINT_EPILOG
from scripts.train_joint import add_joint_options
from training.checkpoint import METRICS
from training.losses import LOSSES
from training.objective import DECAY
from training.schedule import Schedule

UNROLLING = "ttt_steps", "regression", "noise"
STACKED = "heads", "layers", "output", "joint"
# Options of other kinds of heads. The states of EAGLE-3 are no features, so nothing can hold them to those.
FOREIGN = {"medusa": UNROLLING, "hydra": UNROLLING, "eagle": STACKED, "eagle3": (*STACKED, "regression")}

DESCRIPTION = "Train a head that guesses what a model says next. The model itself stays as it is, but for --joint."
EPILOG = """\
The folder --out becomes the head's: config.json and model.safetensors are the head of the best validation so far, to
be used with --proposer and --head. Beside them lie metrics.jsonl (a line a logged step: step, tokens, loss, the
share of guesses that agree with the model's, by head; and at validations tau) and checkpoint.pt, from which --resume
goes on. Validation decodes prompts that were held out (one in fifty) and counts tokens a forward pass: tau.
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="train.py",
        description=DESCRIPTION,
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
        'itself, as distill.py makes them; "finished": false says that an answer was cut off',
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder that the head goes to")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    parser.add_argument("--init", type=Path, metavar="DIR", help="start from the head in this folder")
    parser.add_argument("--plan", action="store_true", help="print sizes and expected time, and do nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and tau: a .png or .svg file")
    add_head_options(parser)
    add_training_options(parser)
    add_unrolling_options(parser)
    add_joint_options(parser)
    group = parser.add_argument_group("features")
    group.add_argument(
        "--cache", type=Path, metavar="DIR", help="keep the model's features here, for epochs and heads to come"
    )
    group.add_argument("--cache-gib", type=float, default=20.0, metavar="X", help="at most so large (default: 20)")
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 where the device is fast at it"
    )
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.set_defaults(device_map=None, accelerate="packed")
    return parser


def add_head_options(parser: argparse.ArgumentParser) -> None:
    """The options that shape a new head."""
    group = parser.add_argument_group("the head (with --init, that head's own)")
    group.add_argument("--heads", type=at_least(1), metavar="N", help="for medusa and hydra: tokens ahead (default: 4)")
    group.add_argument("--layers", type=at_least(1), metavar="N", help="for medusa and hydra: blocks (default: 1)")
    group.add_argument(
        "--prefix", action="store_true", help="for hydra: look back over the text with a decoder layer first (Hydra++)"
    )
    group.add_argument(
        "--output",
        choices=get_args(Output),
        help="for medusa and hydra: own, a matrix for each guess; shared, one for all, begun as the model's; target, "
        "the model's own, not trained (default: shared)",
    )
    group.add_argument(
        "--draft-vocab",
        type=at_least(1),
        metavar="N",
        help="guess only the N tokens most frequent in the answers (default: the whole vocabulary)",
    )


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """The options that `make_schedule` reads, and some more."""
    group = parser.add_argument_group("training")
    group.add_argument("--loss", choices=LOSSES, default="kl", help="see training/README.md (default: %(default)s)")
    group.add_argument(
        "--decay",
        type=float,
        default=DECAY,
        metavar="X",
        help="weight of each guess against that for the token before it (default: %(default)s)",
    )
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


def add_unrolling_options(parser: argparse.ArgumentParser) -> None:
    """The options of heads that go on from their own states."""
    group = parser.add_argument_group("eagle and eagle3")
    group.add_argument(
        "--ttt-steps",
        type=at_least(1),
        metavar="N",
        help=f"drafting steps to train through, as in EAGLE-3 and HASS (default: {TTT_STEPS}; 1 is EAGLE-1)",
    )
    group.add_argument(
        "--regression",
        type=float,
        metavar="X",
        help="for eagle: weight of the distance from the model's next feature (default: 10, as published)",
    )
    group.add_argument(
        "--noise", type=float, metavar="X", help="added to features, at most (default: 0; EAGLE-1 was trained with 0.1)"
    )


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


def check_head_options(args: argparse.Namespace) -> None:
    """Raise ValueError where an option is for another kind of head, or out of range."""
    if args.prefix and (args.head != "hydra" or args.init is not None):
        raise ValueError("--prefix is for a new hydra head; leave it out, or leave out --init")
    for name in FOREIGN[args.head]:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is not for {args.head} heads; leave it out")
    if not 0 < args.decay < math.inf:
        raise ValueError(f"--decay is {args.decay}; it must be a positive number")
    for name in ("regression", "noise"):
        if getattr(args, name) is not None and not 0 <= getattr(args, name) < math.inf:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be a number from 0 on")


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError where options exclude each other, or files are missing, would be overwritten or not written."""
    check_head_options(args)
    if not 0 <= args.cache_gib < math.inf:
        raise ValueError(f"--cache-gib is {args.cache_gib}; it must be a number from 0 on")
    for file in args.data:
        if not file.is_file():
            raise ValueError(f"--data {file}: there is no such file")
    if args.plot is not None:
        check_writable(args.plot, "--plot")
        check_plot(args.plot)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file; give a folder")
    if args.plan or not args.out.is_dir():
        return
    if not args.resume and any(args.out.iterdir()):
        raise ValueError(f"--out {args.out} is not empty; give --resume to go on there, or another folder")
    if (args.out / "config.json").exists() and not (args.out / METRICS).exists():
        raise ValueError(f"--out {args.out} holds a model and no training to resume; give another folder")
