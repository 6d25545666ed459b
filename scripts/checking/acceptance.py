"""How many draft tokens of a head are accepted: here compared with its calibration, and in vLLM compared with here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import eq
from pathlib import Path

from decode import Stats, Target, generate, stream
from decode.models.user_cache import print_notice
from heads.checkpoint import load_head
from proposers import HEAD_PROPOSERS, HeadProposer
from proposers.calibration import FILE
from scripts.benchmark.tables import to_markdown
from scripts.checking.engine import Answers, EngineFailure, ask_engine
from scripts.checking.rules import Finding, error, warning

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs are that in 4 weeks?",
    "Write a Python function that reverses a list.",
)
TRIAL_TOKENS, SERVED_TOKENS = 48, 96  # of each answer
NODES = 16
USELESS_TAU = 1.05  # below it, draft tokens are right by chance at best
EXPECTED_SHARE = 0.7  # least share of the tau that the calibration expects
SERVED_SHARE = 0.8  # least share of the draft tokens accepted in Draftless


@dataclass(frozen=True)
class TrialResult:
    """tau, the mean acceptance length, in trees of `NODES` nodes; and the tau that the calibration expects, if any."""

    tau: float
    expected: float | None
    tokens: int

    def describe(self) -> str:
        expected = "no expected tau" if self.expected is None else f"an expected tau of {self.expected:.2f}"
        return f"tau {self.tau:.2f} over {self.tokens} tokens, greedy, {NODES} nodes; {FILE} states {expected}"

    def check(self) -> Iterator[Finding]:
        """What is wrong with this tau."""
        if self.tau < USELESS_TAU:
            text = f"tau is {self.tau:.2f}: little training, other layers, another target's head or chat template?"
            yield error("draftless", "accepts-nothing", text)
        elif self.expected is not None and self.tau < EXPECTED_SHARE * self.expected:
            text = f"tau is {self.tau:.2f}, {FILE} states {self.expected:.2f}: did head, target or template change?"
            yield warning("draftless", "accepts-less-than-card", text)


def run_trial(target: Target, proposer: HeadProposer) -> TrialResult:
    """Answer `PROMPTS` greedily with trees of `NODES` nodes."""
    answers = generate(target, PROMPTS, proposer, max_new_tokens=TRIAL_TOKENS, nodes=NODES)
    tokens, steps = (sum(getattr(answer.stats, name) for answer in answers) for name in ("tokens", "steps"))
    expected = proposer.calibration.expect_tau(NODES)[-1] if proposer.calibration else None
    return TrialResult(tokens / steps, expected, tokens)


@dataclass(frozen=True)
class ServedResult:
    """A head in vLLM and in Draftless, and vLLM without the head."""

    kind: str
    dtype: str
    plain: Answers
    vllm: Answers
    draftless: Answers

    def count_equal(self, side: Answers) -> int:
        """How many texts are vLLM's own without the head."""
        return sum(map(eq, self.plain.tokens, side.tokens))

    def describe(self) -> str:
        sides, count, texts = (self.vllm, self.draftless), len(self.vllm.accepted), len(self.plain.tokens)
        shares = [[f"{side.accepted[place] / max(side.drafts, 1):.3f}" for side in sides] for place in range(count)]
        table = to_markdown(
            [
                [f"{self.kind}, {count} draft tokens", f"vLLM {self.vllm.versions['vllm']}", "Draftless"],
                ["text as in vLLM without it", *(f"{self.count_equal(side)} of {texts}" for side in sides)],
                ["drafts", *(str(side.drafts) for side in sides)],
                *([f"accepted at position {place}", *cells] for place, cells in enumerate(shares, start=1)),
                ["tokens per draft, bonus token included", *(f"{side.tokens_per_draft:.2f}" for side in sides)],
            ]
        )
        versions = ", ".join(" ".join(pair) for pair in self.vllm.versions.items())
        return f"{table}\n\n{texts} prompts, greedy, {self.dtype}; {versions}"

    def check(self) -> Iterator[Finding]:
        """What is wrong with the served head."""
        equal, texts = self.count_equal(self.vllm), len(self.plain.tokens)
        if equal < texts:
            text = f"{texts - equal} of {texts} texts differ from vLLM's without the head; near-ties can do that"
            yield warning("vllm", "served-text-differs", text)
        ours, theirs = self.draftless.tokens_per_draft, self.vllm.tokens_per_draft
        if theirs - 1 < SERVED_SHARE * (ours - 1):
            text = f"{theirs:.2f} tokens per draft, but {ours:.2f} in Draftless: vLLM drafts something else"
            yield error("vllm", "served-accepts-less", text)


def serve_head(
    folder: Path, kind: str, draft_tokens: int, target: Target, python: str
) -> tuple[ServedResult | None, list[Finding]]:
    """The comparison and its findings; or None and the reason why vLLM does not serve it. python: one with vLLM."""
    dtype, model = str(target.dtype).removeprefix("torch."), str(target.model.name_or_path)
    prompts, ours = draft_chains(folder, target, draft_tokens)
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    request = {"model": model, "dtype": dtype, "prompts": prompts, "stop_ids": sorted(target.stop_ids)}
    request |= {"max_new_tokens": SERVED_TOKENS, "draft_tokens": draft_tokens, "head": None, "method": None}
    name, fault = "engine-fails", "vLLM does not serve the model, with this head or without it"
    try:
        print_notice(f"vLLM answers {len(prompts)} prompts without the head")
        plain = ask_engine(python, request)
        name, fault = "engine-refuses", f"vLLM {plain.versions['vllm']} serves the model, but not with this head"
        print_notice("vLLM answers them with the head")
        served = ask_engine(python, request | {"head": str(folder.resolve()), "method": kind})
    except EngineFailure as reason:
        return None, [error("vllm", name, f"{fault}: {reason}")]
    result = ServedResult(kind, dtype, plain, served, ours)
    return result, list(result.check())


def draft_chains(folder: Path, target: Target, count: int) -> tuple[list[list[int]], Answers]:
    """The prompts' tokens, and Draftless's answers with chains of `count` draft tokens.

    The head is in the target's dtype, as in vLLM. Answers are made longer than wanted and cut, because vLLM's last
    draft is a whole one, too.
    """
    head = load_head(folder, target.dtype, target.vocabulary, target.config.num_hidden_layers)
    proposer = HEAD_PROPOSERS[head.kind](head, depth=count, width=1, nodes=count + 1)
    made, stats, answers = Counter[int](), Stats(accepted_by_depth=[0] * count), {}
    for chunk in stream(target, PROMPTS, proposer, max_new_tokens=SERVED_TOKENS + count, text=False):
        if 0 < made[chunk.request_id] < SERVED_TOKENS:  # the prefill has no draft
            stats.add(chunk.stats)
        made[chunk.request_id] += len(chunk.tokens)
        if chunk.answer is not None:
            answers[chunk.request_id] = chunk.answer
    ordered = [answers[place] for place in range(len(PROMPTS))]
    tokens = [answer.tokens[:SERVED_TOKENS] for answer in ordered]
    return [answer.prompt for answer in ordered], Answers(tokens, stats.steps, list(stats.accepted_by_depth))
