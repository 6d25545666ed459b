"""What a training does with its head: the loss, the training targets, validation and saving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from decode import Target
from draftless_commands.head_training.measurements import validate
from draftless_commands.head_training.options import TrainOptions
from draftless_commands.shared.options import ADAPTER_FOLDER, fetch_checkpoint
from heads.checkpoint import save_head
from heads.formats.written_checkpoint import Checkpoint, read_checkpoint
from proposers.calibration import FILE
from training.factory import make_objective
from training.joint import RANK, Adapters, JointObjective
from training.teacher import Teacher
from training.trainer import Validation

Prompts = Sequence[Sequence[int]]


class Parts(NamedTuple):
    """The parts of a training that depend on what is trained; as for `Trainer`."""

    objective: nn.Module
    teacher: Teacher
    validate: Callable[[], Validation]
    save_best: Callable[[], None]


def make_parts(options: TrainOptions, target: Target, head: Any, prompts: Prompts) -> Parts:
    """The parts for a head or draft model. With --joint, the target gets adapters.

    prompts: to validate on. Raises ValueError as `Adapters` does.
    """
    objective = make_objective(head, target, **options.objective)
    if not options.joint:
        save = head.save if options.kind == "draft" else partial(save_head, head)
        check = partial(validate, target, head, prompts)
        return Parts(objective, Teacher(target, head.features), check, partial(_save, save, options.out))
    adapters = Adapters(target, options.model, options.lora_rank or RANK)
    return Parts(
        JointObjective(adapters, objective),
        Teacher(target, (), adapters.off),
        partial(_validate_adapted, adapters, head, prompts),
        partial(_save, partial(_save_both, adapters, head), options.out),
    )


def find_checkpoints(options: TrainOptions) -> tuple[Checkpoint, Checkpoint] | None:
    """For --write-checkpoint: the model's checkpoint, and the one whose MTP module is trained further.

    That is the model's own if it has one, else --init. Raises ValueError if there is no module.
    """
    if options.write_checkpoint is None:
        return None
    if options.init is None:
        raise ValueError("--write-checkpoint needs --init: the model's checkpoint, or a module that was trained before")
    if options.write_checkpoint.resolve() in [each.resolve() for each in (options.out, options.cache) if each]:
        raise ValueError("--write-checkpoint is the folder of --out or --cache; give another one")
    if options.model is None:
        raise ValueError("--write-checkpoint needs --model, a checkpoint; the default model is a GGUF file")
    model = read_checkpoint(fetch_checkpoint(options.model))
    base = model if model.modules else read_checkpoint(options.init)
    if not base.modules:
        raise ValueError(
            f"--write-checkpoint: neither --model {options.model} nor --init {options.init} is a checkpoint with an "
            "MTP module; draftless check --restore-mtp gives the model its base's"
        )
    return model, base


def _validate_adapted(adapters: Adapters, head: Any, prompts: Prompts) -> Validation:
    """Decode with the adapted model as it is loaded later. From now on the head names its weights."""
    adapted = Target(adapters.merge(), adapters.target.tokenizer, accelerate="packed", in_place=True)
    head.config = replace(head.config, target_weights=adapted.weights_fingerprint)
    return validate(adapted, head, prompts)


def _save_both(adapters: Adapters, head: Any, folder: Path, dtype: torch.dtype) -> None:
    adapters.save(folder / ADAPTER_FOLDER)
    save_head(head, folder, dtype)


def _save(save: Callable[[Path, torch.dtype], object], folder: Path) -> None:
    save(folder, torch.bfloat16)
    (folder / FILE).unlink(missing_ok=True)  # the calibration of an earlier head
