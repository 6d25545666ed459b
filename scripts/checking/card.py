"""A model card for a head's folder, as the Hugging Face Hub shows it: what is recorded, and what was measured here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from decode import Target
from decode.models.adapters import find_base, is_adapter
from draftless_commands.checking.report import (
    ENGINES,
    Report,
    describe_speculation,
    list_errors,
    list_servers,
    write_commands,
)
from draftless_commands.checking.serving import DRAFT_MODEL
from draftless_commands.head_training.record import read_record
from draftless_commands.shared.options import ADAPTER_FOLDER, ModelOptions
from draftless_commands.shared.results import to_markdown
from draftless_commands.shared.worth import NODES, count
from heads.atomic_write import write_aside
from heads.checkpoint import load_head, read_target
from heads.formats.weight_files import read_weights
from heads.kinds import get_kind
from proposers.calibration import FILE
from training.checkpoint import read_metrics

CARD = "README.md"
MARK = "<!-- Written by draftless check --card, which may replace this file. -->"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
SIZES = {  # of a head's config
    "heads": "draft tokens",
    "layers": "layers",
    "features": "hidden states that it reads",
    "draft_size": "draft vocabulary",
    "vocab_size": "the model's vocabulary",
    "hidden_size": "hidden size",
}
QUESTION = "Why is the sky blue?"
LONGEST = 60  # characters of a prompt in a table


def check_card(folder: Path) -> None:
    """Raise ValueError if a folder has a README.md that `--card` has not written."""
    file = folder / CARD
    if file.exists() and MARK not in file.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{file} was not written by draftless check --card, so it is kept; move it away first")


class Card:
    """The card of a folder whose head was checked.

    source: the folder with the records of its training. options: of its target. repository: its place on the hub, if it
    is uploaded.
    """

    def __init__(
        self, folder: Path, source: Path, report: Report, target: Target, options: ModelOptions, repository: str | None
    ) -> None:
        self.folder, self.source, self.report, self.repository = folder, source, report, repository
        self.kind, self.head, named = str(report.kind), None, None
        if self.kind != DRAFT_MODEL:
            self.head = load_head(folder, vocab_size=target.vocabulary, layers=target.config.num_hidden_layers)
            named = read_target(folder).target_name
        self.is_named = named is not None or options.model is None or is_adapter(folder / ADAPTER_FOLDER)
        self.has_adapter = options.model is not None and is_adapter(options.model)
        base = find_base(Path(str(options.model))) if self.has_adapter else named or options.model
        self.base = ModelOptions(base).public_name  # None: a path, which means nothing elsewhere
        self.hub_id = self.base if self.base is not None and HUB_ID.fullmatch(self.base) else None

    def save(self) -> Path:
        """Write the card. Returns its file. Raises ValueError as `check_card` does."""
        check_card(self.folder)
        text = "\n\n".join(self.write()) + "\n"
        write_aside(self.folder / CARD, lambda file: file.write(text.encode()))
        return self.folder / CARD

    def write(self) -> Iterator[str]:
        """The parts of the text."""
        yield "\n".join(self._write_metadata())
        noun = "draft model" if self.head is None else f"{self.kind} head"
        yield f"{MARK}\n\n# {self.folder.resolve().name}: {noun}" + (f" for {self.base}" if self.base else "")
        adapted = " with an adapter" if self.has_adapter else ""
        yield (
            f"It drafts tokens, which its model{adapted} verifies (speculative decoding): the text is the model's, in "
            "fewer forward passes."
        )
        yield to_markdown([["fact", "value"], *self._list_facts()])
        yield "## Training"
        yield from self._describe_training()
        if self.report.tau is not None:
            yield "## Acceptance"
            yield from self._describe_acceptance()
        yield "## Use"
        yield from self._describe_use()

    def _write_metadata(self) -> Iterator[str]:
        """The front matter. The hub refuses a base model that is no id of its own."""
        yield "---"
        if self.hub_id is not None:
            yield f"base_model: {self.hub_id}"
        yield from ("library_name: draftless", "tags:", "- draftless", "- speculative-decoding", f"- {self.kind}")
        yield "---"

    def _list_facts(self) -> Iterator[list[str]]:
        tensors = [each for each in read_weights(self.folder)[0].values() if each.is_floating_point()]
        size = sum(each.numel() * each.itemsize for each in tensors)
        dtypes = ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in tensors}))
        if self.base is not None:
            yield ["base model", self.base]
        yield ["kind", self.kind]
        yield ["parameters", f"{sum(each.numel() for each in tensors):,} ({size / 1e6:.1f} MB, {dtypes})"]
        for name, label in SIZES.items():
            value: Any = getattr(getattr(self.head, "config", None), name, None)
            if value is not None:
                yield [label, ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value:,}"]

    def _describe_training(self) -> Iterator[str]:
        record, taus = read_record(self.source), [row for row in read_metrics(self.source) if "tau" in row]
        if not record:
            yield "The folder has no record of the data and the command."
        else:
            yield (
                f"Data: {', '.join(record['data'])}; {count(record['examples'], 'example')} with "
                f"{count(record['answer_tokens'], 'answer token')}, and {count(record['held_out_prompts'], 'prompt')} "
                "held out."
            )
            if record["continued"]:
                yield "It began as another head, whose own data are not listed here."
            yield f"```sh\n{record['command']}\n```"
        if taus:
            best = max(taus, key=lambda row: row["tau"])
            yield (
                f"It has seen {count(best['tokens'], 'answer token')}, repeats included. On held-out prompts its tau, "
                f"the mean acceptance length, was {best['tau']:.2f} in trees of {NODES} nodes."
            )

    def _describe_acceptance(self) -> Iterator[str]:
        report = self.report
        yield (
            "Tau, the mean acceptance length: tokens per forward pass of the model, bonus token included. Greedy, in "
            f"trees of {NODES} nodes, as `draftless check` measures it; the 95 % interval is bootstrapped over prompts."
        )
        rows = [
            [shorten(prompt, LONGEST, placeholder=" ..."), f"{tokens / steps:.2f}", f"{tokens}"]
            for prompt, (tokens, steps) in report.by_prompt.items()
        ]
        low, high = report.tau_interval or (report.tau, report.tau)
        rows.append(["all", f"{report.tau:.2f} [{low:.2f}, {high:.2f}]", f"{report.tokens}"])
        yield to_markdown([["prompt", "tau", "tokens"], *rows])
        if report.expected_tau is not None:
            yield f"On the prompts of its calibration (`{FILE}`), tau is expected to be {report.expected_tau:.2f}."
        if report.drift is not None:
            yield f"{report.drift.describe().capitalize()}."

    def _describe_use(self) -> Iterator[str]:
        place = self.folder.resolve().name
        origin = "" if self.head is None else get_kind(self.kind).origin
        words = ["draftless", "generate", *([] if self.is_named else ["--model", self.hub_id or "MODEL"])]
        words += ["--proposer", place] if self.head is None else ["--head", place]
        words += ["--proposer", Path(origin).name] if origin else []
        fetch = f"hf download {self.repository} --local-dir {shlex.quote(place)}\n" if self.repository else ""
        yield f"```sh\n{fetch}{shlex.join([*words, '--prompt', QUESTION])}\n```"
        if self.has_adapter:
            yield "Servers need a MODEL with the adapter merged into it."
        model = "MODEL" if self.has_adapter else self.hub_id or "MODEL"
        served = write_commands(self.kind, describe_speculation(self.head, self.repository or place), model)
        for engine in ENGINES:
            if engine not in list_servers(self.kind):
                yield f"{NAMES[engine]} has no class for {self.kind} heads."
            elif self.report.commands.get(engine) is None:
                errors = list_errors(self.report.findings, engine)
                yield f"It is not for {NAMES[engine]} as it is:" + "".join(f"\n- {each.text}" for each in errors)
            else:
                yield f"{NAMES[engine]}:\n\n```sh\n{served[engine]}\n```"
