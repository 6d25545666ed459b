"""The commands that serve a target with a head."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from scripts.serving_rules.folder import Engine, Finding, HeadFolder
from scripts.serving_rules.medusa import TOKEN_MAP_FINDING, count_blocks

ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
DRAFT_TOKENS = 3  # in a chain, as is usual


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


def _write_vllm(folder: HeadFolder, model: str) -> str:
    tokens = count_blocks(folder)[0] if folder.kind == "medusa" else DRAFT_TOKENS
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
