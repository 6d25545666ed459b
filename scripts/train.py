"""Train a head that drafts for a model. The model itself is not changed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from decode.models.fingerprint import describe_model
from heads.checkpoint import save_head
from scripts.head_training.measurements import plot_training, print_plan, validate
from scripts.head_training.options import TrainOptions, make_parser
from scripts.head_training.setup import describe_settings, fill_cache, get_head, load_model_and_data, make_accelerator
from scripts.shared.command import failing_clearly
from training.checkpoint import load_checkpoint
from training.factory import make_objective
from training.feature_cache import BatchLoader
from training.teacher import Teacher
from training.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        options = TrainOptions(**vars(args))
        options.check_files()
        accelerator, options = make_accelerator(options)
        target, dataset = load_model_and_data(options)
        head = get_head(options, target, dataset)
        objective, teacher = make_objective(head, target, **options.objective), Teacher(target, head.features)
        if options.plan:
            print_plan(objective, dataset, options.schedule, BatchLoader(dataset.examples, teacher))
            return

        settings = describe_settings(options, dataset, head)
        model = describe_model(target.model, target.tokenizer)
        state = load_checkpoint(options.out, settings, model, options.changed_model) if options.resume else None
        if state is None and accelerator.is_main_process:
            print_plan(objective, dataset, options.schedule, BatchLoader(dataset.examples, teacher))
        options.out.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(
            objective,
            dataset,
            BatchLoader(dataset.examples, teacher, fill_cache(options, teacher, dataset, accelerator)),
            partial(validate, target, head, dataset.prompts),
            partial(save_head, head, options.out, torch.bfloat16),
            options.schedule,
            options.out,
            accelerator,
            {**settings, **model},
        )
        steps = trainer.run(state, begin_with_best=options.init is not None)
        if accelerator.is_main_process:
            print(trainer.describe() + ("" if steps else "; it was finished already, and nothing was done"))
            if options.plot is not None:
                plot_training(options.out, options.plot)


if __name__ == "__main__":
    main()
