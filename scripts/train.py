"""Train a head or a draft model, which drafts for a model. The model itself is not changed, except with --joint."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs

from decode import Target
from decode.devices.backend import find_backend
from decode.models.fingerprint import find_changes
from draftless_commands.distillation.answers_file import settings_path
from draftless_commands.head_training.measurements import describe_validation, plot_training, print_plan
from draftless_commands.head_training.options import DRAFT_LAYERS, TrainOptions, make_parser
from draftless_commands.head_training.parts import find_checkpoints, make_parts
from draftless_commands.head_training.record import write_record
from draftless_commands.shared.command import failing_clearly
from draftless_commands.shared.options import ModelOptions, load_model_only, load_target
from heads.checkpoint import load_head
from heads.formats.written_checkpoint import Checkpoint, compose_modules, write_checkpoint
from proposers.load import share_matrices
from training.checkpoint import load_checkpoint
from training.data import Dataset, find_rarest, load_dataset
from training.draft_model import DraftModel
from training.factory import make_draft_model, make_head, make_parallel
from training.feature_cache import BatchLoader, FeatureCache
from training.joint import RANK
from training.rendering import Renderer
from training.teacher import Teacher
from training.trainer import Trainer

GIB = 1 << 30
TIMEOUT = timedelta(days=7)  # processes wait for each other while one validates or fills its part of the cache


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    with failing_clearly(parser):
        options = TrainOptions(**vars(args))
        options.check_files()
        accelerator, options = make_accelerator(options)
        train(accelerator, options)
        accelerator.end_training()  # a group of processes that still waits for messages aborts the process at its exit


def train(accelerator: Accelerator, options: TrainOptions) -> None:
    """Print the plan, and train unless it was asked for alone."""
    checkpoints = find_checkpoints(options)
    target, dataset = load_model_and_data(options)
    head = get_head(options, target, dataset)
    if checkpoints is not None:
        compose_modules(*checkpoints, head)  # refuses what could not be written after the training
    model = target.fingerprints  # before it gets adapters
    parts = make_parts(options, target, head, dataset.prompts)
    load_batch = BatchLoader(dataset.examples, parts.teacher)
    settings, resume = describe_settings(options, dataset, head), options.resume and not options.plan
    state = load_checkpoint(options.out, settings, model, options.changed_model) if resume else None
    if state is None and accelerator.is_main_process:
        print_plan(parts.objective, dataset, options.schedule, load_batch, accelerator.num_processes)
    if options.plan:
        return

    options.out.mkdir(parents=True, exist_ok=True)
    if state is None and accelerator.is_main_process:
        write_record(options, dataset)
    if options.cache is not None:
        cache = fill_cache(options, parts.teacher, dataset, accelerator)
        load_batch = BatchLoader(dataset.examples, parts.teacher, cache)
    trainer = Trainer(
        parts.objective,
        dataset,
        load_batch,
        parts.validate,
        parts.save_best,
        options.schedule,
        options.out,
        accelerator,
        {**settings, **model},
    )
    steps = trainer.run(state, begin_with_best=options.init is not None)
    if accelerator.is_main_process:
        print(trainer.describe() + ("" if steps else "; it was finished already, and nothing was done"))
        print(describe_validation(dataset.prompts))
        write_results(options, checkpoints)


def write_results(options: TrainOptions, checkpoints: tuple[Checkpoint, Checkpoint] | None) -> None:
    """The plot and the checkpoint, if they were asked for. checkpoints: as of `find_checkpoints`."""
    if options.plot is not None:
        plot_training(options.out, options.plot)
    if options.write_checkpoint is not None and checkpoints is not None:
        head: Any = load_head(options.out)
        write_checkpoint(*checkpoints, options.write_checkpoint, head)
        print(f"{options.write_checkpoint} is {checkpoints[0].folder} with the trained module")


def make_accelerator(options: TrainOptions) -> tuple[Accelerator, TrainOptions]:
    """One process or one of several, and the options with device and dtype filled in."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    state = PartialState(cpu=options.device == "cpu" or not torch.cuda.is_available(), timeout=TIMEOUT)
    is_fast = find_backend(state.device).is_fast_in_bfloat16 and not options.joint
    dtype = options.dtype or ("bfloat16" if is_fast else "float32")
    # torch 2.11 does not have the replacement, forward_sync_buffers.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    accelerator = Accelerator(
        cpu=not find_backend(state.device).waits,
        mixed_precision="bf16" if dtype == "bfloat16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # buffers never change
    )
    return accelerator, replace(options, device=str(state.device), dtype=dtype)


def load_model_and_data(options: TrainOptions) -> tuple[Target, Dataset]:
    """The target, and the conversations of --data. Raises ValueError if they do not fit each other."""
    accelerate = "off" if options.joint else "packed"  # packed layers cannot be trained
    target = load_target(ModelOptions(options.model, options.dtype, options.device, accelerate=accelerate))
    length = min(options.max_length, target.context)
    renderer = Renderer(target.tokenizer, options.template_option, ends=target.stop_ids)
    reading = {"max_bad": options.max_bad, "use_text": options.use_text}
    dataset = load_dataset(options.data, renderer, length, options.validation, **reading)
    if PartialState().is_main_process:
        warn_of_data(options.data, target, dataset)
    if not dataset.prompts:
        raise ValueError(
            "no prompt is held out for validation: the data needs ten at least, short enough for the model"
        )
    highest = max(map(max, [*(example.tokens for example in dataset.examples), *dataset.prompts]))
    if highest >= target.vocabulary:
        raise ValueError(
            f"the tokenizer makes token {highest} of the data, but the model's vocabulary is {target.vocabulary}: "
            "the tokenizer is another model's"
        )
    return target, dataset


def warn_of_data(files: Sequence[Path], target: Target, dataset: Dataset) -> None:
    """Print what is wrong with the data and ends no training: rows that were skipped, answers of another model."""
    if dataset.bad:
        print(f"skipped: {dataset.bad}", file=sys.stderr)
    now = target.fingerprints
    for file in files:
        settings = settings_path(file)
        if not settings.is_file():
            continue
        try:
            changes = find_changes(dict(json.loads(settings.read_bytes())), now)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{settings} is damaged ({error}); remove it to go on without") from error
        if changes:
            print(
                f"{file} has answers of another model: its {changes} changed; heads are best trained on the model's "
                "own answers",
                file=sys.stderr,
            )


def get_head(options: TrainOptions, target: Target, dataset: Dataset) -> Any:
    """A new head or draft model, or that of --init.

    Raises ValueError if it contradicts other options, or is for another target.
    """
    torch.manual_seed(options.seed)
    head: Any
    if options.kind == "draft":
        head = _make_draft_model(options, target, dataset)
    elif options.init is None:
        head = make_head(options.kind, target, dataset.examples, options.draft_vocab, **options.shape)
    else:
        head = _load_head(options, target, dataset)
    head.config = replace(head.config, target_weights=target.weights_fingerprint)
    if options.kind != "draft":  # with --joint, its target is the adapted model
        name = None if options.joint else ModelOptions(options.model).public_name
        head.config = replace(head.config, target_name=name)
    return head


def _make_draft_model(options: TrainOptions, target: Target, dataset: Dataset) -> DraftModel:
    """A draft model that is cut out of the target, or that of --init."""
    name = options.model if options.init is None else str(options.init)
    # Apart from the target, whose layers are packed: these are trained.
    model, tokenizer = load_model_only(ModelOptions(name, "float32", options.device))
    layers: Sequence[int] | None = None
    if options.init is None:
        count, total = options.layers or DRAFT_LAYERS, target.config.num_hidden_layers
        if count >= total:
            raise ValueError(f"--layers is {count}; a draft of this model has 1 to {total - 1}")
        layers = range(count)
    return make_draft_model(model, tokenizer, target, dataset.examples, layers, options.draft_vocab)


def _load_head(options: TrainOptions, target: Target, dataset: Dataset) -> Any:
    sizes = target.vocabulary, target.config.num_hidden_layers
    head: Any = load_head(options.init, torch.float32, *sizes)
    share_matrices(head, target)
    head.check_target(target.config.hidden_size, *sizes)
    if head.kind != options.kind:  # `options` has checked that it can start from this kind
        head = make_parallel(head, find_rarest(dataset.examples, target.vocabulary), options.heads, options.layers)
    has = {"draft_vocab": head.draft_size, "window": head.window}
    for name, given in (options.shape | {"draft_vocab": options.draft_vocab}).items():
        if given is not None and given != (value := has.get(name, getattr(head.config, name, None))):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {given}, and the head of --init {options.init} has {value}")
    if head.output == "target":
        head.borrow(target.output_matrix, target.output_bias)
    return head


def describe_settings(options: TrainOptions, dataset: Dataset, head: Any) -> dict[str, Any]:
    """The settings that must be equal for a training to be resumed."""
    schedule = asdict(options.schedule)
    del schedule["save_every"], schedule["validate_every"]
    tokens = [] if head.token_map is None else head.token_map.tolist()  # a checkpoint has only draft ids
    return {
        **schedule,
        **{name: getattr(options, name) for name in ("kind", "dtype", "max_length", "use_text", "validation")},
        "template_options": dict(options.template_option or ()),
        "data": dataset.fingerprint,
        "cached": True if options.cache else None,  # probabilities are kept in half precision
        "init": options.init and str(options.init.resolve() if options.init.exists() else options.init),
        "shape": {name: value for name, value in asdict(head.config).items() if not name.startswith("target_")},
        "lora_rank": (options.lora_rank or RANK) if options.joint else None,
        "draft_vocabulary": hashlib.sha256(str(tokens).encode()).hexdigest()[:16],
        **options.objective,
    }


def fill_cache(options: TrainOptions, teacher: Teacher, dataset: Dataset, accelerator: Accelerator) -> FeatureCache:
    """The cache of --cache, filled up to --cache-gib; each process fills its part."""
    assert options.cache is not None
    settings = {"data": dataset.fingerprint, "dtype": options.dtype, "layers": list(teacher.layers)}
    with accelerator.main_process_first():
        cache = FeatureCache(options.cache, settings | teacher.target.fingerprints)
    limit, process, processes = int(options.cache_gib * GIB), accelerator.process_index, accelerator.num_processes
    with cache.locked() if accelerator.is_main_process else nullcontext():
        accelerator.wait_for_everyone()
        cache.fill(teacher, dataset.examples, limit, process, processes)
        accelerator.wait_for_everyone()
    cache.scan()
    return cache


if __name__ == "__main__":
    main()
