"""What check.py reports about a folder: the findings of all rules for its kind, as data and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from decode import Target
from scripts.serving_rules.auxiliary_layers import AUXILIARY_LAYER_RULES
from scripts.serving_rules.commands import ENGINES, list_errors
from scripts.serving_rules.decoder_layer import DECODER_LAYER_RULES
from scripts.serving_rules.eagle import EAGLE_RULES
from scripts.serving_rules.eagle3 import EAGLE3_RULES
from scripts.serving_rules.folder import Engine, Finding, HeadFolder, error
from scripts.serving_rules.medusa import HYDRA_RULES, MEDUSA_RULES
from scripts.serving_rules.trial import TrialResult

ServingRule = Callable[[HeadFolder, Target], Iterator[Finding]]
SERVING_RULES: dict[str, tuple[ServingRule, ...]] = {
    "eagle": (*EAGLE_RULES, *DECODER_LAYER_RULES),
    "eagle3": (*EAGLE3_RULES, *AUXILIARY_LAYER_RULES, *DECODER_LAYER_RULES),
    "medusa": MEDUSA_RULES,
    "hydra": HYDRA_RULES,
}
SOURCES = """\
The rules were read in the source of vLLM 0.33 (Medusa: up to 0.32) and SGLang 0.5.23. EAGLE and EAGLE-3 folders were
served in vLLM 0.32 and 0.33 on a CPU; SGLang's classes load them, but they were not served there."""


@dataclass(frozen=True)
class Report:
    """The result for one folder. `decode` is None if no draft token was tried."""

    folder: str
    target: str | None
    kind: str | None
    findings: list[Finding]
    commands: dict[Engine, str]
    decode: TrialResult | None = None

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
    return "\n".join(lines)


def _explain_missing_command(report: Report, engine: Engine) -> str:
    if errors := len(list_errors(report.findings, engine)):
        return f"no command until the errors above are corrected ({errors})"
    return f"it does not serve {report.kind} heads"
