"""The options of `draftless train`: `TrainOptions`, its parser, and what is checked before anything is loaded."""

# ruff: noqa: RUF009  (`flag` returns a dataclass field)

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from decode.models.adapters import require_peft
from decode.models.loading import check_model
from draftless_commands.shared.command import Parser, at_least, check_new_folder, check_output_folder, check_plot
from draftless_commands.shared.options import parse_own_kind
from draftless_commands.shared.prompts import TEMPLATE_OPTION
from heads.checkpoint import find_kind
from heads.kinds import KINDS, get_kind
from heads.vocabulary import Output
from training.checkpoint import METRICS
from training.data import MAX_BAD, read_rows
from training.factory import find_objective
from training.joint import JOINT_KINDS, RANK
from training.losses import LOSSES
from training.objectives import DECAY, OBJECTIVES, PACE, REGRESSION, TTT_STEPS, Decay, Objective
from training.trainer import Schedule

TRAINED = (*OBJECTIVES, "draft")  # kinds of heads, and draft models
UNROLLING = {"ttt_steps": ("steps", TTT_STEPS), "regression": ("regression", REGRESSION), "noise": ("noise", 0.0)}
DRAFT_LAYERS = 4
JOINT = "joint", "lora_rank"
GROUPS = {  # of the help text, by their first option
    "model": "model",
    "heads": "shape of a new head",
    "loss": "training",
    "joint": "Medusa-2",
    "ttt_steps": "EAGLE heads and MTP modules",
}

EPILOG = """\
--out becomes the head's folder for --head of other commands, or the draft model's for --draft-model: always the one of
the best validation so far.

metrics.jsonl has loss and agreement by depth of each logged step, and tau of each validation, which decodes held-out
prompts (one in fifty). Tau is the mean acceptance length: tokens per forward pass of the model, bonus token included.
"""


def flag(text: str, default: Any = None, **settings: Any) -> Any:
    """A dataclass field for a command-line option with this help text; settings: as for `add_argument`."""
    return field(default=default, metadata={"help": text, **settings})


def number(text: str, default: float | None = None, low: int = 1) -> Any:
    """An option with a number: of the default's type, and a whole number from `low` on if that is not a float."""
    shown = "" if default is None else " (default: %(default)s)"
    kind = float if isinstance(default, float) else at_least(low)
    return flag(text + shown, default, type=kind, metavar="X" if kind is float else "N")


def list_options(kind: str) -> set[str]:
    """The options that are for heads of some kinds, this one among them."""
    joint = JOINT if kind in JOINT_KINDS else ()
    if kind == "draft":
        return {"layers", *find_objective(kind).options}
    written = ("write_checkpoint",) if get_kind(kind).in_checkpoint else ()
    return {*get_kind(kind).options, *find_objective(kind).options, *joint, *written}


def is_given(value: Any) -> bool:
    """Whether an option has a value; 0 is one."""
    return value is not None and value is not False


def parse_decay(text: str) -> Decay:
    """The value of --decay."""
    try:
        return PACE if text == PACE else float(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {PACE}") from error


@dataclass(frozen=True)
class TrainOptions:
    """The command line of `draftless train`, a field for each option. Raises ValueError if they do not fit together."""

    kind: str = flag(
        f"the kind of head to train: {', '.join(TRAINED)}, or one of your own as FILE.py:CLASS (docs/training.md). "
        "draft is a small model with some of the model's own layers",
        type=parse_own_kind,
        required=True,
        metavar="KIND",
    )
    data: tuple[Path, ...] = flag(
        "JSON Lines files of prompts with their answers, or of conversations (docs/training.md has the formats); best "
        "the model's own answers, as draftless distill writes them; their token ids are read",
        **{"type": Path, "nargs": "+", "required": True, "metavar": "FILE"},
    )
    out: Path = flag("the folder for the head or draft model", type=Path, required=True, metavar="DIR")
    resume: bool = flag("continue from the checkpoint in --out, if there is one", False)
    changed_model: bool = flag(
        "with --resume: go on although weights, vocabulary or chat template of the model have changed", False
    )
    max_bad: float = number("fail if more than this share of the rows cannot be trained on", MAX_BAD)
    use_text: bool = flag("read the texts of distilled answers, not their token ids", False)
    template_option: list[tuple[str, Any]] | None = flag(
        TEMPLATE_OPTION["help"], **{name: value for name, value in TEMPLATE_OPTION.items() if name != "help"}
    )
    init: Path | None = flag(
        "start from the head in this folder; peagle: an EAGLE-3 head will do; mtp: a folder with the model's "
        "checkpoint has its MTP module; draft: from this model (a folder or hub id), which may be of any kind that has "
        "the model's tokenizer",
        type=Path,
        metavar="DIR",
    )
    plan: bool = flag("print sizes and the expected time, then exit", False)
    write_checkpoint: Path | None = flag(
        "mtp: at the end, write the model's checkpoint with the trained module here", type=Path, metavar="DIR"
    )
    plot: Path | None = flag("plot loss and tau to a .png or .svg file", type=Path, metavar="FILE")

    model: str | None = flag(
        "a local folder, a hub id, a GGUF file or the folder of a peft adapter (default: SmolLM2-135M-Instruct)"
    )
    dtype: str | None = flag("default: bfloat16 if the device is fast at it", choices=["float32", "bfloat16"])
    device: str | None = flag("default: cuda if there is a GPU", choices=["cpu", "cuda"])
    cache: Path | None = flag("store the model's features here, for later runs", type=Path, metavar="DIR")
    cache_gib: float = number("largest size of the cache", 20.0)

    heads: int | None = number(
        "medusa, multi-token, hydra, peagle and dflash: draft tokens (default: 4; peagle and dflash: 6)"
    )
    layers: int | None = number(
        "medusa and hydra: blocks of each head (default: 1); eagle3, peagle and dflash: decoder layers (default: 1, "
        f"dflash: 2); draft: layers of the model (default: {DRAFT_LAYERS})"
    )
    pair_rank: int | None = number(
        "dflash: rank of the score of a draft token after the one before it; 0: none, so that all paths have the same "
        "next tokens (default: 64)",
        low=0,
    )
    window: int | None = number(
        "multi-token, eagle, eagle3, jump, peagle and dflash: attend to the last N tokens only, for texts much longer "
        "than those that it is trained on"
    )
    prefix: bool = flag("hydra: a decoder layer first, which attends to the whole text (Hydra++)", False)
    output: Output | None = flag(
        "medusa, multi-token and hydra: own, an output matrix for each head; shared, one for all, which starts as the "
        "model's; target, the model's, not trained (default: shared; of more than 64k tokens, target)",
        choices=get_args(Output),
    )
    draft_vocab: int | None = number(
        "draft only the N tokens most frequent in the answers (default: all; of more than 64k, those that cover "
        "98 %% of the answers, 8k to 32k)"
    )

    loss: str = flag("see docs/training.md (default: %(default)s)", "kl", choices=[*LOSSES])
    temperature: float = number("train at this temperature, at most 1, at which the head is to draft", 1.0)
    decay: Decay = flag(
        "weight of each draft token relative to the one before; or pace: D-PACE's weights, by how likely a draft gets "
        "there, which cost a second product with the output matrix (default: %(default)s)",
        DECAY,
        type=parse_decay,
        metavar="X",
    )
    epochs: int = number("passes over the data", Schedule.epochs)
    max_steps: int | None = number("stop after N steps")
    batch_tokens: int = number("tokens in a batch, padding included", Schedule.batch_tokens)
    max_length: int = number("cut examples to N tokens", 2048, low=2)
    lr: float = number("highest learning rate", Schedule.lr)
    seed: int = number("of weights and order", Schedule.seed, low=0)
    save_every: int = number("steps between checkpoints", Schedule.save_every)
    validate_every: int = number("steps between validations", Schedule.validate_every)
    patience: int = number("stop after N validations without a better tau", Schedule.patience)
    validation: int = number("prompts to decode in a validation", 16)

    joint: bool = flag(
        "medusa and hydra, with --init: train the model too, by low-rank adapters. They are written to --out/adapter, "
        "which is then the model for this head",
        False,
    )
    lora_rank: int | None = number(f"rank of the adapters (default: {RANK})")

    ttt_steps: int | None = number(f"drafting steps to train through (default: {TTT_STEPS}; EAGLE-1 has 1)")
    regression: float | None = flag(
        "eagle: weight of the distance from the model's features (default: 10, as published)", type=float, metavar="X"
    )
    noise: float | None = flag("uniform noise on features (default: 0; EAGLE-1 has 0.1)", type=float, metavar="X")

    fc_norm: bool = flag("eagle3 and peagle: a norm for the features of each layer that it reads (EAGLE-3.1)", False)
    normed_feedback: bool = flag("eagle3: feed normed states back from step to step (EAGLE-3.1)", False)

    def __post_init__(self) -> None:
        if self.kind not in {*TRAINED, *KINDS}:
            raise ValueError(f"--kind {self.kind}: choose from {', '.join(TRAINED)} and FILE.py:CLASS")
        if self.prefix and self.init is not None:
            raise ValueError("--prefix is for a new hydra head; leave it out, or leave out --init")
        for name in sorted(set[str]().union(*map(list_options, TRAINED)) - list_options(self.kind)):
            if is_given(getattr(self, name)):
                kind = "draft models" if self.kind == "draft" else f"{self.kind} heads"
                raise ValueError(f"--{name.replace('_', '-')} is not for {kind}; leave it out")
        self._check_joint()
        if self.kind == "draft" and self.init is not None and self.layers:
            raise ValueError("--layers is for a draft that is cut out of the model; leave out --init")
        if self.kind == "draft" and self.decay != DECAY:
            raise ValueError("--decay is for heads, which have several depths; leave it out")
        if self.decay == PACE and find_objective(self.kind).feature_loss is not Objective.feature_loss:
            if "regression" not in self.objective:
                raise ValueError(f"--decay pace weighs no distance from features, and {self.kind} heads have one")
            if self.objective["regression"]:
                raise ValueError("--decay pace weighs no distance from features; give --regression 0 too")
        if not 0 < self.temperature <= 1:
            raise ValueError(f"--temperature is {self.temperature}; it must be above 0 and at most 1")
        if self.seed >= 1 << 32:
            raise ValueError(f"--seed is {self.seed}; it must be at most {(1 << 32) - 1}")
        if not 0 <= self.max_bad <= 1:
            raise ValueError(f"--max-bad is {self.max_bad}; it must be a share from 0 to 1")
        for name in ("lr", "decay"):
            value = getattr(self, name)
            if value != PACE and not 0 < value < math.inf:
                raise ValueError(f"--{name} is {value}; it must be a positive number")
        for name in ("regression", "noise", "cache_gib"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be a number from 0 on")

    def _check_joint(self) -> None:
        """Raise ValueError for options that do not fit --joint."""
        if self.lora_rank and not self.joint:
            raise ValueError("--lora-rank is for --joint; leave it out, or give both")
        if not self.joint:
            return
        if self.init is None:
            raise ValueError("--joint needs a trained head: train one without --joint first, then name it with --init")
        if self.cache is not None:
            raise ValueError("--joint recomputes the features in each step, since the model changes; leave out --cache")
        if self.dtype == "bfloat16":
            raise ValueError("--joint trains in float32; leave out --dtype")

    @property
    def schedule(self) -> Schedule:
        return Schedule(**{each.name: getattr(self, each.name) for each in fields(Schedule)})

    @property
    def objective(self) -> dict[str, Any]:
        """The settings of the objective, as `make_objective` takes them."""
        settings: dict[str, Any] = {"loss": self.loss, "decay": self.decay}
        if self.temperature != 1:
            settings["temperature"] = self.temperature
        for name in find_objective(self.kind).options:
            argument, default = UNROLLING[name]
            settings[argument] = default if getattr(self, name) is None else getattr(self, name)
        return settings

    @property
    def shape(self) -> dict[str, Any]:
        """The options that are given for the shape of a new head."""
        named = {name: getattr(self, name) for name in get_kind(self.kind).options}
        return {name: value for name, value in named.items() if is_given(value)}

    def check_files(self) -> None:
        """Raise ValueError if input files are missing or of another kind, or output files cannot be written there."""
        for file in self.data:
            if not file.is_file():
                raise ValueError(f"--data {file}: there is no such file")
        if self.joint:
            require_peft()
        read_rows(self.data, self.max_bad)
        self._check_start()
        check_plot(self.plot)
        check_output_folder(self.cache, "--cache")
        check_output_folder(self.out, "--out")
        check_new_folder(self.write_checkpoint, "--write-checkpoint")
        if self.plan or not self.out.is_dir():
            return
        if not self.resume and any(self.out.iterdir()):
            raise ValueError(f"--out {self.out} is not empty; give --resume to go on there, or another folder")
        if (self.out / "config.json").exists() and not (self.out / METRICS).exists():
            raise ValueError(f"--out {self.out} holds a model, but no training to resume; give another folder")

    def _check_start(self) -> None:
        """Raise ValueError if --init has nothing of the kind that is trained."""
        if self.init is None:
            return
        if self.kind == "draft":
            check_model(self.init)
        elif (kind := find_kind(self.init)) not in (self.kind, KINDS[self.kind].begins_as):
            raise ValueError(f"--init {self.init} holds a head of kind {kind}, not {self.kind}")


def make_parser(description: str | None) -> Parser:
    """The parser whose results are the arguments of `TrainOptions`."""
    parser = Parser(prog="draftless train", description=description, epilog=EPILOG)
    group: Any = parser
    for option in fields(TrainOptions):
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        settings = {"action": "store_true"} if option.default is False else {"default": option.default}
        group.add_argument(f"--{option.name.replace('_', '-')}", **settings, **option.metadata)
    return parser
