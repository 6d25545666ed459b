"""A head served in vLLM, compared with Draftless: the same prompts, and chains of as many draft tokens.

vLLM runs in a Python of its own, because it needs other versions than Draftless.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path
from typing import Any

from decode import Stats, Target, stream
from decode.devices.user_cache import print_notice, working_folder
from decode.models.adapters import is_adapter
from decode.models.loading import load_model
from draftless_commands.checking.rules import Finding, error, warning
from draftless_commands.shared.results import to_markdown
from draftless_commands.shared.terminal import list_answers, show_progress
from heads.checkpoint import load_head
from proposers import DraftProposer, TreeProposer
from proposers.draft_models.loading import is_trained_draft, load_draft_model
from proposers.options import find_proposer

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "A farmer has 12 hens. Each hen lays 5 eggs a week. How many eggs are that in 4 weeks?",
    "Write a Python function that reverses a list.",
)
DRAFT_MODEL = "draft_model"  # what vLLM calls them
NEW_TOKENS = 96  # of each answer
LEAST_SHARE = 0.8  # of the draft tokens accepted in Draftless
PROGRAM = Path(__file__).with_name("vllm_program.py")
FIND = "from importlib.util import find_spec; raise SystemExit(find_spec('vllm') is None)"
TIMEOUT = 1800  # seconds for loading and a few prompts; a small model on two cores takes one or two minutes
ISOLATED = {"PYTHONSAFEPATH": "1"}  # folders of a script and of the user hide no module of vLLM's
SHOWN = 500  # characters of a reason


@dataclass(frozen=True)
class Answers:
    """A program's answers, and what it accepted."""

    tokens: list[list[int]]  # of each answer, stop token included
    drafts: int
    accepted: list[int]  # [i]: drafts whose token i was accepted
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_per_draft(self) -> float:
        """The bonus token included; the prefill, which has no draft, is not counted."""
        return 1 + sum(self.accepted) / max(self.drafts, 1)


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
        if theirs - 1 < LEAST_SHARE * (ours - 1):
            text = f"{theirs:.2f} tokens per draft, but {ours:.2f} in Draftless: vLLM drafts something else"
            yield error("vllm", "served-accepts-less", text)


def serve_head(
    folder: Path, kind: str, speculation: Mapping[str, Any], target: Target, python: str
) -> tuple[ServedResult | None, list[Finding]]:
    """The comparison and its findings; or None and the reason why vLLM does not serve it.

    speculation: vLLM's settings for it. python: one with vLLM.
    """
    model = str(target.model.name_or_path)
    if not model.endswith(".gguf") and not is_adapter(model):
        return _serve_head(folder, kind, speculation, target, python, model)
    with working_folder() as unpacked:  # vLLM reads few GGUF files, none on a CPU, and no adapter alone
        whole, tokenizer = load_model(model, dtype=target.dtype)
        whole.save_pretrained(unpacked)
        tokenizer.save_pretrained(unpacked)
        del whole
        return _serve_head(folder, kind, speculation, target, python, str(unpacked))


def _serve_head(
    folder: Path, kind: str, speculation: Mapping[str, Any], target: Target, python: str, model: str
) -> tuple[ServedResult | None, list[Finding]]:
    dtype = str(target.dtype).removeprefix("torch.")
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    draft_tokens = speculation["num_speculative_tokens"]
    prompts, ours = draft_chains(folder, target, draft_tokens)
    request = {"model": model, "dtype": dtype, "prompts": prompts, "stop_ids": sorted(target.stop_ids)}
    request |= {"max_new_tokens": NEW_TOKENS, "draft_tokens": draft_tokens, "speculation": None}
    name, fault = "engine-fails", "vLLM does not serve the model, with this head or without it"
    try:
        print_notice(f"vLLM answers {len(prompts)} prompts without the head, and then with it")
        plain = ask_engine(python, request)
        name, fault = "engine-refuses", f"vLLM {plain.versions['vllm']} serves the model, but not with this head"
        served = ask_engine(python, request | {"speculation": speculation})
    except RuntimeError as reason:
        return None, [error("vllm", name, f"{fault}: {reason}")]
    result = ServedResult(kind, dtype, plain, served, ours)
    return result, list(result.check())


def draft_chains(folder: Path, target: Target, count: int) -> tuple[list[list[int]], Answers]:
    """The prompts' tokens, and Draftless's answers with chains of `count` draft tokens.

    The head is in the target's dtype, as in vLLM. Answers are made longer than wanted and cut, because vLLM's last
    draft is a whole one, too.
    """
    proposer: TreeProposer
    shape: dict[str, Any] = {"depth": count, "width": 1, "nodes": count + 1}
    if is_trained_draft(folder):
        proposer = DraftProposer(load_draft_model(folder, dtype=target.dtype, device=str(target.device)), **shape)
    else:
        head = load_head(folder, target.dtype, target.vocabulary, target.config.num_hidden_layers)
        proposer = find_proposer(head.kind)(head, **shape)
    made, stats = Counter[int](), Stats(accepted_by_depth=[0] * count)
    most = NEW_TOKENS + count
    given = stream(target, PROMPTS, proposer, max_new_tokens=most, text=False)
    chunks = [*show_progress(given, most * len(PROMPTS))]
    answers = list_answers(chunks)
    for chunk in chunks:
        if 0 < made[chunk.request_id] < NEW_TOKENS:  # the prefill has no draft
            stats.add(chunk.stats)
        made[chunk.request_id] += len(chunk.tokens)
    tokens = [answer.tokens[:NEW_TOKENS] for answer in answers]
    return [answer.prompt for answer in answers], Answers(tokens, stats.steps, list(stats.accepted_by_depth))


def check_engine(python: str) -> None:
    """Raise ValueError if this Python cannot import vLLM."""
    try:
        run = subprocess.run([python, "-c", FIND], capture_output=True, env=os.environ | ISOLATED)
    except OSError as error:
        raise ValueError(f"--engine-python {python} does not run: {error.strerror}") from error
    if run.returncode:
        raise ValueError(f"--serve needs vLLM, and {python} has none; name a Python with vLLM by --engine-python")


def ask_engine(python: str, request: Mapping[str, Any]) -> Answers:
    """The answers of vLLM to a request. Raises RuntimeError, with the reason in one line, if there are none."""
    settings: dict[str, Any] = {"text": True, "env": os.environ | ISOLATED, "start_new_session": True}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen([python, str(PROGRAM)], **streams, **settings) as process:
            try:
                out, _ = process.communicate(json.dumps(request), TIMEOUT)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"it did not answer within {TIMEOUT / 60:g} minutes") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with all processes that vLLM started
        if process.returncode == -signal.SIGKILL:
            raise RuntimeError("it was killed, most likely because memory ran out")
        try:
            result: dict[str, Any] = json.loads(out)
        except ValueError:
            log.seek(0)
            last = (log.read().strip().splitlines() or ["it printed nothing"])[-1]
            raise RuntimeError(f"it ended with status {process.returncode}: {last[:SHOWN]}") from None
    if "error" in result:
        raise RuntimeError(result["error"][:SHOWN])
    return Answers(**result)
