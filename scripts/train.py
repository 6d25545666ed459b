"""Train a head that guesses what a model says next. The model itself stays as it is, but for --joint."""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs

from decode import Target
from decode.cpu.acceleration import is_fast_in_bfloat16
from heads.checkpoint import save_head
from scripts.shared.command import failing_clearly
from scripts.shared.options import ModelOptions, load_model_only
from scripts.train_heads import describe_objective, load_init, make_head, make_objective
from scripts.train_joint import join
from scripts.train_options import check_options, make_parser, make_schedule
from scripts.train_plan import print_plan
from scripts.train_plot import plot_training
from scripts.train_validation import Validator
from training.cache import FeatureCache
from training.checkpoint import load_checkpoint as load_state
from training.data import Dataset, load_dataset
from training.lessons import Lessons
from training.schedule import Schedule
from training.teacher import Teacher
from training.trainer import Trainer

GIB = 1 << 30
WAIT = timedelta(days=7)  # of processes for one another: while one validates, or fills its part of the cache


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        schedule = make_schedule(args)
        check_options(args)
        accelerator = make_accelerator(args)
        target = Target(
            *load_model_only(ModelOptions.from_args(args), "off" if args.joint else None)
        )  # packed layers cannot learn
        dataset = read_data(args, target)
        head = load_init(args, target) if args.init is not None else make_head(args, target, dataset)
        objective: Any = make_objective(args, target, head)
        teacher, save_best = Teacher(target, head.features), partial(save_head, head, args.out, torch.bfloat16)
        if args.joint:
            objective, teacher, save_best = join(args, target, objective, save_best)
        validate = Validator(target, head, dataset.prompts)
        if args.plan:
            print_plan(objective, dataset, schedule, Lessons(dataset.examples, teacher))
            return
        settings = describe_settings(args, target, head, schedule)
        state = load_state(args.out, settings) if args.resume else None
        args.out.mkdir(parents=True, exist_ok=True)
        lessons = Lessons(dataset.examples, teacher, fill_cache(args, teacher, dataset, accelerator))
        trainer = Trainer(objective, dataset, lessons, validate, save_best, schedule, args.out, accelerator, settings)
        made = trainer.run(state, begin_with_best=args.init is not None and not args.joint)
        if accelerator.is_main_process:
            print(describe(trainer, made))
            if args.plot is not None:
                plot_training(args.out, args.plot)


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """A process of one or several, with its device; what was left open of the options is decided."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    state = PartialState(cpu=args.device == "cpu" or not torch.cuda.is_available(), timeout=WAIT)
    args.device = str(state.device)
    if args.dtype is None:
        args.dtype = "bfloat16" if is_fast_in_bfloat16(state.device) else "float32"
    # torch 2.11 does not know what replaces it: forward_sync_buffers.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    return Accelerator(
        cpu=state.device.type == "cpu",
        mixed_precision="bf16" if args.dtype == "bfloat16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # they never change
    )


def read_data(args: argparse.Namespace, target: Target) -> Dataset:
    """The conversations of --data. Raises ValueError where their tokens are not the target's."""
    length = min(args.max_length, target.context)
    dataset = load_dataset(args.data, target.tokenizer, length, args.validation, target.stop_ids)
    texts = [*(example.tokens for example in dataset.examples), *dataset.prompts]
    highest = max(map(max, texts))
    if highest >= target.vocabulary:
        raise ValueError(
            f"the tokenizer makes token {highest} of the data, but the model's vocabulary is {target.vocabulary}: "
            "the tokenizer is another model's"
        )
    return dataset


def describe_settings(args: argparse.Namespace, target: Target, head: Any, schedule: Schedule) -> dict[str, Any]:
    """What a training that is resumed must have been begun with."""
    kept = {name: value for name, value in asdict(schedule).items() if name not in ("save_every", "validate_every")}
    return {
        **kept,
        **describe_features(args, target),
        "head": args.head,
        "init": None if args.init is None else _place(str(args.init)),
        "shape": asdict(head.config),
        "draft_vocabulary": _digest_vocabulary(head),
        **describe_objective(args),
        "lora_rank": args.lora_rank if args.joint else None,
        "validation": args.validation,
    }


def describe_features(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What the features of the examples depend on."""
    digest = hashlib.sha256()
    for file in args.data:
        digest.update(file.read_bytes())
    return {
        "target": _place(target.model.config.name_or_path),
        "hidden_size": target.config.hidden_size,
        "data": digest.hexdigest()[:16],
        "max_length": args.max_length,
        "dtype": args.dtype,
    }


def _digest_vocabulary(head: Any) -> str | None:
    """Tells draft vocabularies of one size apart: a checkpoint has no map from draft ids to the target's."""
    return None if head.token_map is None else hashlib.sha256(head.token_map.cpu().numpy().tobytes()).hexdigest()[:16]


def _place(name: str) -> str:
    """A hub id as it is, of a folder the whole path, however it was given."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def fill_cache(
    args: argparse.Namespace, teacher: Teacher, dataset: Dataset, accelerator: Accelerator
) -> FeatureCache | None:
    """The cache of --cache, with all that fits into it; every process makes its part."""
    if args.cache is None:
        return None
    settings = {**describe_features(args, teacher.target), "layers": list(teacher.layers)}
    with accelerator.main_process_first():
        cache = FeatureCache(args.cache, settings)
    limit, process, processes = int(args.cache_gib * GIB), accelerator.process_index, accelerator.num_processes
    with cache.locked() if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        cache.fill(teacher, dataset.examples, limit, process, processes)
        accelerator.wait_for_everyone()
    cache.scan()
    return cache


def describe(trainer: Trainer, made: int) -> str:
    """What has become of a training, in one line."""
    progress = trainer.progress
    end = f", then {progress.stale} validations without a better one" if progress.step < trainer.steps else ""
    done = f"{progress.step} of {trainer.steps} steps, tau {progress.best_tau:.2f} at best{end}"
    return f"{trainer.folder}: {done}" + ("" if made else "; it was finished already, and nothing was done")


if __name__ == "__main__":
    main()
