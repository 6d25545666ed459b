"""What check.py reports about a folder: the findings of all rules for its kind, and the commands that serve it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from decode import Target
from scripts.serving.comparison import ServedResult
from scripts.serving_rules.eagle import DECODER_LAYER_RULES, EAGLE_RULES
from scripts.serving_rules.eagle3 import EAGLE3_RULES
from scripts.serving_rules.folder import Engine, Finding, HeadFolder, error
from scripts.serving_rules.medusa import HYDRA_RULES, MEDUSA_RULES, TOKEN_MAP_FINDING, count_blocks
from scripts.serving_rules.trial import TrialResult

ServingRule = Callable[[HeadFolder, Target], Iterator[Finding]]
SERVING_RULES: dict[str, tuple[ServingRule, ...]] = {
    "eagle": EAGLE_RULES,
    "eagle3": (*EAGLE3_RULES, *DECODER_LAYER_RULES),
    "medusa": MEDUSA_RULES,
    "hydra": HYDRA_RULES,
}
ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
DRAFT_TOKENS = 3  # in a chain, as is usual
SOURCES = """\
The rules were read in the source of vLLM 0.33 (Medusa: up to 0.32) and SGLang 0.5.23. EAGLE and EAGLE-3 folders were
served in vLLM 0.32 and 0.33 on a CPU; SGLang's classes load them, but they were not served there. --serve tries it."""


@dataclass(frozen=True)
class Report:
    """The result for one folder. `decode` is None if no draft token was tried, `served` if no engine served it."""

    folder: str
    target: str | None
    kind: str | None
    findings: list[Finding]
    commands: dict[Engine, str]
    decode: TrialResult | None = None
    served: ServedResult | None = None

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def find_faults(folder: HeadFolder, target: Target, kind: str | None = None) -> list[Finding]:
    """The findings of all rules. kind: what the head has to be; None accepts every kind."""
    found = []
    if kind is not None and folder.kind not in (kind, None):
        found.append(error("both", "other-kind", f"it is of kind {folder.kind}, not {kind}; engines would misread it"))
    for rule in SERVING_RULES.get(folder.kind or "", ()):
        try:
            found += rule(folder, target)
        except ValueError as fault:  # a value in config.json has the wrong type
            found.append(error("both", "config-value", str(fault)))
    return list(dict.fromkeys(found))


def list_errors(findings: Sequence[Finding], engine: Engine) -> list[Finding]:
    """The errors that keep an engine from serving the head, or that keep the head from being accepted."""
    return [each for each in findings if each.level == "error" and each.engine in (engine, "both", "draftless")]


def write_commands(folder: HeadFolder, model: str, findings: Sequence[Finding]) -> dict[Engine, str]:
    """A command for each engine that serves this kind of head and has no error.

    A Medusa head's command ends in a comment with the versions of vLLM that can run it.
    """
    vllm, sglang = _write_vllm(folder, model), _write_sglang(folder, model)
    blocking = [each for each in findings if each.name != TOKEN_MAP_FINDING]  # it holds for newer versions only
    commands: dict[Engine, str] = {}
    if folder.kind == "medusa":
        commands = {"vllm": f"{vllm}  # vllm<={'0.32' if len(blocking) == len(findings) else '0.20'}"}
    elif folder.kind in ("eagle", "eagle3"):
        commands = {"vllm": vllm, "sglang": sglang}
    return {engine: command for engine, command in commands.items() if not list_errors(blocking, engine)}


def count_draft_tokens(folder: HeadFolder) -> int:
    """How many tokens a server should draft in a chain: a Medusa head's, one each; else the usual number."""
    return count_blocks(folder)[0] if folder.kind == "medusa" else DRAFT_TOKENS


def _write_vllm(folder: HeadFolder, model: str) -> str:
    tokens = count_draft_tokens(folder)
    config = {"method": folder.kind, "model": str(folder.path.resolve()), "num_speculative_tokens": tokens}
    return shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(config)])


def _write_sglang(folder: HeadFolder, model: str) -> str:
    """The algorithm must be the head's: an EAGLE-3 head as EAGLE would run and accept nothing."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(model)} --speculative-algorithm "
        f"{str(folder.kind).upper()} --speculative-draft-model-path {shlex.quote(str(folder.path.resolve()))} "
        f"--speculative-num-steps {DRAFT_TOKENS} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {DRAFT_TOKENS + 1}"
    )


def describe_report(report: Report, engine: Engine | None) -> str:
    """The report as lines of text, with the command of one engine or of all."""
    lines = [f"{each.level:7} {each.engine:9} {each.name}: {each.text}" for each in report.findings]
    lines = [" ".join(line.split("\n")) for line in lines] or ["no findings"]
    if report.kind is not None:
        lines.append("")
        for name in (engine,) if engine else ENGINES:
            lines.append(f"{name}: {report.commands.get(name) or _explain_missing_command(report, name)}")
        lines += ["", SOURCES]
    if report.decode is not None:
        lines += ["", report.decode.describe()]
    if report.served is not None:
        lines += ["", report.served.describe()]
    return "\n".join(lines)


def _explain_missing_command(report: Report, engine: Engine) -> str:
    if errors := len(list_errors(report.findings, engine)):
        return f"no command until the errors above are corrected ({errors})"
    return f"it does not serve {report.kind} heads"
