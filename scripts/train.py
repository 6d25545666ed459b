"""Train a head that drafts for a model. The model itself is not changed, except with --joint."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that this runs as a file, installed or not
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds; Ctrl-C ends them without a traceback

import torch

from heads.checkpoint import save_head
from scripts.head_training.options import TrainOptions, make_parser
from scripts.head_training.plan import print_plan
from scripts.head_training.plot import plot_training
from scripts.head_training.setup import describe_settings, fill_cache, get_head, load_data, load_model, make_accelerator
from scripts.head_training.validation import Validator
from scripts.options import failing_clearly
from training.checkpoint import load_checkpoint
from training.factory import make_objective
from training.feature_cache import BatchLoader
from training.medusa2 import add_adapters
from training.teacher import Teacher
from training.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        options = TrainOptions(**vars(args))
        options.check_files()
        accelerator, options = make_accelerator(options)
        target = load_model(options)
        schedule, dataset = options.schedule, load_data(options, target)
        head = get_head(options, target, dataset)
        objective: Any = make_objective(head, target, **options.objective)
        teacher, save_best = Teacher(target, head.features), partial(save_head, head, options.out, torch.bfloat16)
        if options.joint:
            folder = options.out / "model"
            objective, teacher, save_best = add_adapters(
                target, objective, options.lora_rank, options.seed, folder, save_best
            )
        validate = Validator(target, head, dataset.prompts)
        if options.plan:
            print_plan(objective, dataset, schedule, BatchLoader(dataset.examples, teacher))
            return
        settings = describe_settings(options, target, head)
        state = load_checkpoint(options.out, settings) if options.resume else None
        options.out.mkdir(parents=True, exist_ok=True)
        load_batch = BatchLoader(dataset.examples, teacher, fill_cache(options, teacher, dataset, accelerator))
        trainer = Trainer(
            objective, dataset, load_batch, validate, save_best, schedule, options.out, accelerator, settings
        )
        steps = trainer.run(state, begin_with_best=options.init is not None and not options.joint)
        if accelerator.is_main_process:
            print(trainer.describe() + ("" if steps else "; it was finished already, and nothing was done"))
            if options.plot is not None:
                plot_training(options.out, options.plot)


if __name__ == "__main__":
    main()
