"""All rules that a head's folder is held to, by its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from decode import Target
from scripts import check_aux, check_eagle, check_eagle3, check_layer, check_medusa
from scripts.check_folder import Finding, HeadFolder

Rule = Callable[[HeadFolder, Target], Iterator[Finding]]
RULES: dict[str | None, tuple[Rule, ...]] = {
    "eagle": (*check_eagle.RULES, *check_layer.RULES),
    "eagle3": (*check_eagle3.RULES, *check_aux.RULES, *check_layer.RULES),
    "medusa": check_medusa.MEDUSA_RULES,
    "hydra": check_medusa.HYDRA_RULES,
    None: (),
}


def find_faults(folder: HeadFolder, target: Target, kind: str | None = None) -> list[Finding]:
    """What the rules find. kind: what the head is said to be, where that is said."""
    found = []
    if kind is not None and folder.kind not in (kind, None):
        text = f"it is of kind {folder.kind}, not {kind}; servers would misread it without a word"
        found.append(Finding("error", "both", "other-kind", text))
    for rule in RULES[folder.kind]:
        try:
            found += rule(folder, target)
        except ValueError as error:  # a word of the config is of a type that it cannot have
            found.append(Finding("error", "both", "config-value", str(error)))
    return list(dict.fromkeys(found))
