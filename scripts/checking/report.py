"""The report of check.py: findings, the commands that serve the model with the head, and what was accepted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from heads.formats.layout import Head
from scripts.checking.acceptance import ServedResult, TrialResult
from scripts.checking.rules import Engine, Finding

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
DRAFT_TOKENS = 3  # in a chain, as is usual


@dataclass(frozen=True)
class Report:
    """The result for one folder. `decode` is None if no draft token was tried, `served` if no engine served it."""

    folder: str
    target: str
    kind: str | None  # None: the head could not be loaded
    findings: list[Finding]
    commands: Mapping[Engine, str | None]  # None: not served, or not without a fault
    decode: TrialResult | None = None
    served: ServedResult | None = None

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    def describe(self) -> str:
        lines = [f"{each.level:7} {each.engine:9} {each.name}: {each.text}" for each in self.findings]
        lines = [" ".join(line.split("\n")) for line in lines] or ["no findings"]
        missing = f"no command: there is an error above, or it does not serve {self.kind} heads"
        lines += [f"\n{engine}: {command or missing}" for engine, command in self.commands.items()]
        return "\n".join([*lines, *(f"\n{part.describe()}" for part in (self.decode, self.served) if part)])


def count_draft_tokens(head: Head) -> int:
    """How many tokens a server should draft in a chain: a Medusa head's, one each; else the usual number."""
    return int(head.config.heads) if head.kind == "medusa" else DRAFT_TOKENS


def write_commands(head: Head, folder: str, model: str) -> dict[Engine, str]:
    """A command for each engine that serves heads of this kind."""
    if head.kind == "hydra":
        return {}
    config = {"method": head.kind, "model": folder, "num_speculative_tokens": count_draft_tokens(head)}
    vllm = shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(config)])
    if head.kind == "medusa":
        return {"vllm": f"{vllm}  # vllm<=0.32"}
    sglang = (
        f"python -m sglang.launch_server --model-path {shlex.quote(model)} --speculative-algorithm "
        f"{head.kind.upper()} --speculative-draft-model-path {shlex.quote(folder)} --speculative-num-steps "
        f"{DRAFT_TOKENS} --speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS + 1}"
    )  # the algorithm must be the head's: an EAGLE-3 head as EAGLE would run and accept nothing
    return {"vllm": vllm, "sglang": sglang}
