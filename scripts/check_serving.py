"""The commands that serve a target with a head, and to which engines a finding matters."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from scripts.check_folder import Engine, Finding, HeadFolder
from scripts.check_medusa import count_blocks

SERVERS: tuple[Engine, ...] = ("vllm", "sglang")
AHEAD = 3  # tokens that are guessed in a chain, as is usual


def list_errors(findings: Iterable[Finding], engine: Engine) -> list[Finding]:
    """The errors that keep one engine from serving the head, or from being faster with it."""
    return [each for each in findings if each.level == "error" and each.engine in (engine, "both", "draftless")]


def write_commands(folder: HeadFolder, target: str, findings: Iterable[Finding]) -> dict[Engine, str]:
    """A command for each server that has the method and nothing against the folder."""
    found, place, kind = list(findings), str(folder.path.resolve()), folder.kind
    commands: dict[Engine, str] = {}
    if kind in ("eagle", "eagle3", "medusa"):
        ahead = count_blocks(folder)[0] if kind == "medusa" else AHEAD
        said = json.dumps({"method": kind, "model": place, "num_speculative_tokens": ahead})
        commands["vllm"] = shlex.join(["vllm", "serve", target, "--speculative-config", said])
    if kind in ("eagle", "eagle3"):
        options = {
            "model-path": target,
            "speculative-algorithm": kind.upper(),  # EAGLE for an EAGLE-3 head would accept next to nothing
            "speculative-draft-model-path": place,
            "speculative-num-steps": AHEAD,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": AHEAD + 1,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        commands["sglang"] = shlex.join(["python", "-m", "sglang.launch_server", *words])
    return {engine: command for engine, command in commands.items() if not list_errors(found, engine)}
