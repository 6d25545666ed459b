"""The report on a head's folder: findings, the commands that serve the model with the head, and what was accepted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from decode import Proposer, Target, stream
from decode.models.adapters import is_adapter
from draftless_commands.checking.drift import Drift
from draftless_commands.checking.rules import (
    Engine,
    Finding,
    error,
    find_draft_faults,
    find_faults,
    has_markov_head,
    warning,
)
from draftless_commands.checking.serving import DRAFT_MODEL, PROMPTS, ServedResult, serve_head
from draftless_commands.shared.results import INTERVAL, resample
from draftless_commands.shared.terminal import list_answers, show_progress
from draftless_commands.shared.worth import DRAFT_WIDTH, NODES, Worth, count, describe_tau, find_worth
from heads.kinds import get_kind
from heads.vocabulary import VocabularyHead
from proposers import HeadProposer, load_proposer
from proposers.calibration import FILE

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
DRAFT_TOKENS = 3  # in a chain, as is usual
NEW_TOKENS = 48  # of each answer here
USELESS_TAU = 1.05  # below it, draft tokens are right by chance at best
EXPECTED_SHARE = 0.7  # least share of the tau that the calibration expects


@dataclass(frozen=True)
class Report:
    """The result for one folder. tau: the mean acceptance length here in trees of `NODES` nodes.

    tau_interval: of 95 %, bootstrapped over the prompts. drift: if the target has an adapter. Without drafting, tau,
    its interval, worth and drift are None.
    """

    folder: str
    target: str
    kind: str | None  # None: the head could not be loaded
    findings: list[Finding]
    commands: Mapping[Engine, str | None]  # None: not served, or not without a fault
    tau: float | None = None
    tau_interval: tuple[float, float] | None = None
    by_prompt: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # new tokens, and passes of the target
    expected_tau: float | None = None  # by the head's calibration, of trees of as many nodes
    worth: Worth | None = None
    drift: Drift | None = None
    served: ServedResult | None = None

    @property
    def tokens(self) -> int:
        """Those that tau rests on."""
        return sum(tokens for tokens, _ in self.by_prompt.values())

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    def describe(self) -> str:
        lines = [f"{each.level:7} {each.engine:9} {each.name}: {each.text}" for each in self.findings]
        lines = [" ".join(line.split("\n")) for line in lines] or ["no findings"]
        for engine, command in self.commands.items():
            blocked = "no command until the errors above are corrected"
            missing = blocked if engine in list_servers(self.kind) else f"it does not serve {self.kind} heads"
            lines.append(f"\n{engine}: {command or missing}")
        lines += [f"\n{self.served.describe()}"] if self.served is not None else []
        if self.drift is not None:
            lines.append(f"\n{self.drift.describe()}")
        if self.tau is not None and self.tau_interval is not None and self.worth is not None:
            expected = "nothing" if self.expected_tau is None else f"{self.expected_tau:.2f}"
            low, high = self.tau_interval
            basis = f"{count(self.tokens, 'token')} of {count(len(PROMPTS), 'prompt')}, greedy"
            interval = f"95 % interval {low:.2f} to {high:.2f}"
            lines.append(f"\n{describe_tau(self.tau, f'{basis}, {interval}')}; {FILE} expects {expected}")
            lines.append(self.worth.describe())
        return "\n".join(lines)


def report_fault(path: Path, name: str, fault: ValueError) -> Report:
    """The report on a folder whose head does not load. name: the target's."""
    return Report(str(path), name, None, [error("draftless", "does-not-load", str(fault))], {})


def check_folder(
    path: Path, target: Target, name: str, decode: bool = True, engine_python: str | None = None
) -> Report:
    """Load the head, look for silent faults and, with `decode`, draft with it.

    name: the target's, for the commands. engine_python: a Python with vLLM to serve the head in; None serves nothing.
    """
    try:
        load = partial(load_proposer, path, target)
        proposer, head = load(nodes=NODES), None
        if isinstance(proposer, HeadProposer):
            head = proposer.head
            findings = find_faults(path, head, target)
        else:
            draft = proposer.draft_model
            width = 1 if draft.is_recurrent else DRAFT_WIDTH
            load = partial(load_proposer, "draft", target, draft_model=draft, width=width)
            proposer, findings = load(nodes=NODES), find_draft_faults(draft, target)
    except ValueError as fault:
        return report_fault(path, name, fault)
    kind, speculation = DRAFT_MODEL if head is None else head.kind, describe_speculation(head, str(path.resolve()))
    commands = write_commands(kind, speculation, "MODEL" if is_adapter(name) else name)
    tau, interval, by_prompt, expected, worth, served = None, None, {}, None, None, None
    if decode:
        by_prompt = count_accepted(target, proposer)
        tokens, steps = map(sum, zip(*by_prompt.values(), strict=True))
        tau, interval = tokens / steps, tuple(resample([*by_prompt.values()]).quantile(INTERVAL).tolist())
        calibration = getattr(proposer, "calibration", None)
        expected = calibration.expect_tau(NODES)[-1] if calibration else None
        findings += judge_tau(tau, expected)
        worth = find_worth(target, load(), PROMPTS)
    if engine_python is not None:
        served, faults = serve_head(path, kind, speculation, target, engine_python)
        findings += faults
    usable = {engine: None if list_errors(findings, engine) else commands.get(engine) for engine in ENGINES}
    return Report(str(path), name, kind, findings, usable, tau, interval, by_prompt, expected, worth, served=served)


def count_accepted(target: Target, proposer: Proposer) -> dict[str, tuple[int, int]]:
    """The new tokens and the target's passes of each of `PROMPTS`."""
    chunks = stream(target, PROMPTS, proposer, max_new_tokens=NEW_TOKENS, nodes=NODES, text=False)
    answers = list_answers(show_progress(chunks, len(PROMPTS) * NEW_TOKENS))
    return {prompt: (each.stats.tokens, each.stats.steps) for prompt, each in zip(PROMPTS, answers, strict=True)}


def list_errors(findings: Sequence[Finding], engine: Engine) -> list[Finding]:
    """What keeps an engine from serving the head as it was trained."""
    return [each for each in findings if each.level == "error" and each.engine in (engine, "both", "draftless")]


def judge_tau(tau: float, expected: float | None) -> Iterator[Finding]:
    """What is wrong with this tau."""
    if tau < USELESS_TAU:
        text = f"tau is {tau:.2f}; is the head trained enough, and for this target, its layers and its chat template?"
        yield error("draftless", "accepts-nothing", text)
    elif expected is not None and tau < EXPECTED_SHARE * expected:
        text = f"tau is {tau:.2f}, but {FILE} states {expected:.2f}; did the head, the target or its template change?"
        yield warning("draftless", "accepts-less-than-card", text)


def list_servers(kind: str) -> tuple[str, ...]:
    """The servers that have a class for heads of this kind, or for draft models."""
    return ENGINES if kind == DRAFT_MODEL else get_kind(kind).servers


def describe_speculation(head: VocabularyHead | None, folder: str) -> dict[str, Any]:
    """vLLM's settings for a head, or for a draft model (None)."""
    if head is None:
        return {"method": DRAFT_MODEL, "model": folder, "num_speculative_tokens": DRAFT_TOKENS}
    kind = get_kind(head.kind)
    count = head.config.heads if kind.drafts_at_once else DRAFT_TOKENS
    method = "dspark" if has_markov_head(head) else head.kind
    return {"method": method, "model": folder, "num_speculative_tokens": count, **kind.vllm}


def write_commands(kind: str, speculation: Mapping[str, Any], model: str) -> dict[Engine, str]:
    """A command for each engine that serves heads of this kind, in chains. speculation: vLLM's settings."""
    servers, commands = list_servers(kind), dict[Engine, str]()
    if "vllm" in servers:
        limit = "" if kind == DRAFT_MODEL else get_kind(kind).vllm_limit
        commands["vllm"] = shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(speculation)]) + limit
    if "sglang" in servers:
        folder, draft_tokens = speculation["model"], speculation["num_speculative_tokens"]
        algorithm = "STANDALONE" if kind == DRAFT_MODEL else kind.upper()
        commands["sglang"] = (
            f"python -m sglang.launch_server --model-path {shlex.quote(model)} --speculative-algorithm "
            f"{algorithm} --speculative-draft-model-path {shlex.quote(folder)} --speculative-num-steps "
            f"{draft_tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_tokens + 1}"
        )  # the algorithm must be the head's: an EAGLE-3 head as EAGLE would run and accept nothing
    return commands
