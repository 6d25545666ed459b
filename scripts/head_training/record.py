"""The record of a training: its command and its data, for the model card of its head."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from draftless_commands.head_training.options import TrainOptions, is_given
from draftless_commands.shared.options import ModelOptions
from heads.atomic_write import write_aside
from heads.formats.weight_files import read_json
from heads.kinds import KINDS
from training.data import Dataset

RECORD = "training.json"
FIELDS = "command", "data", "examples", "answer_tokens", "held_out_prompts", "continued"
# Where and how it was run, and not what was trained.
LEFT_OUT = {"resume", "changed_model", "plan", "plot", "device", "cache", "cache_gib"}


def write_record(options: TrainOptions, dataset: Dataset) -> None:
    """Write the record of a training that begins to --out."""
    record = {
        "command": format_command(options),
        "data": [file.name for file in options.data],
        "examples": len(dataset.examples),
        "answer_tokens": dataset.answer_tokens,
        "held_out_prompts": dataset.held_out,
        "continued": options.init is not None,
    }
    write_aside(options.out / RECORD, lambda file: file.write((json.dumps(record, indent=2) + "\n").encode()))


def read_record(folder: Path) -> dict[str, Any]:
    """The record in a head's folder; empty if it has none of ours. Raises ValueError if it is damaged."""
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    return record if {*FIELDS} <= record.keys() else {}


def format_command(options: TrainOptions) -> str:
    """The command of a training, with the options that were given. Of paths it has the last parts alone."""
    words = ["draftless", "train"]
    for option in fields(options):
        value, flag = getattr(options, option.name), f"--{option.name.replace('_', '-')}"
        if option.name in LEFT_OUT or not is_given(value) or value == option.default:
            continue
        if option.name == "template_option":  # once for each
            words += [word for name, given in value for word in (flag, f"{name}={json.dumps(given)}")]
        else:
            values = [] if value is True else value if isinstance(value, list | tuple) else [value]
            words += [flag, *(_spell(option.name, each) for each in values)]
    return shlex.join(words)


def _spell(option: str, value: Any) -> str:
    if isinstance(value, Path):
        return value.name
    if option == "model":
        return ModelOptions(value).name
    if option == "kind" and value in KINDS:
        return Path(KINDS[value].origin).name or str(value)
    return str(value)
