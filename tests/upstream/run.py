"""Run transformers' own tests of generation through `speculate`, and the same tests unaltered as a control.

    python tests/upstream/run.py FOLDER [pytest's options]

FOLDER is a checkout of transformers' repository. Prints a table of outcomes, and the reasons of refusals.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (
    "-m pytest -p redirect_generate -p no:cacheprovider --rootdir . -W ignore -q --tb=no --no-summary "
    "--continue-on-collection-errors"
)
SELECTION = (
    "(test_assisted_decoding or test_prompt_lookup_decoding_matches or test_greedy_generate or test_sample_generate "
    "or test_generate_with_static_cache or generate_methods_with_logits_to_keep or with_and_without_position_ids or "
    "test_generate_continue_from or test_generate_from or test_generate_with_mtp or test_generate_without_input_ids) "
    "and not beam and not Vision and not Image and not Audio and not Integration"
)
# The rows of the table, by a part of a test's name; the first that fits.
GROUPS = {
    "assisted decoding and prompt lookup": "assisted_decoding|prompt_lookup",
    "greedy decoding": "greedy_generate",
    "sampling": "sample_generate",
    "caches and continuing": "static_cache|continue_from",
    "embeddings, positions and other": "",
}


def main() -> None:
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "tests" / "generation" / "test_utils.py").is_file():
        raise SystemExit("usage: run.py FOLDER [pytest's options]; FOLDER is a checkout of transformers' repository")
    folder, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    control, redirected = (run(folder, options, is_control) for is_control in (True, False))
    print(describe(control, redirected))
    passed = {line["test"] for line in control if line["outcome"] == "passed"}
    wrong = [line for line in redirected if line["outcome"] in ("failed", "different") and line["test"] in passed]
    for line in wrong:
        print(f"{line['outcome']}: {line['test']}: {line['reason']}")
    if wrong or not passed:
        raise SystemExit(1)


def run(folder: Path, options: Sequence[str], is_control: bool) -> list[dict[str, Any]]:
    """The outcome of each test."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.jsonl"
        report.touch()
        paths = [folder, folder / "utils", ROOT, ROOT / "tests" / "upstream"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "UPSTREAM_REPORT": str(report),
            "UPSTREAM_CONTROL": str(int(is_control)),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, *PYTEST.split(), "-c", os.devnull, "-k", SELECTION, *(options or ["tests/models"])]
        subprocess.run(command, cwd=folder, env=environment, check=False)
        return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]


def describe(control: Sequence[dict[str, Any]], redirected: Sequence[dict[str, Any]]) -> str:
    """Tables of outcomes by group of tests, and of the reasons of refusals."""
    names = ("passed", "refused", "failed", "different")
    before = {line["test"]: line["outcome"] for line in control}
    rows = ["| tests | passed unaltered | passed | refused by name | failed | other tokens | calls compared |"]
    rows.append("|---|---|---|---|---|---|---|")
    for group in [*GROUPS, "all"]:
        # A test that fails or is skipped without `speculate` says nothing about it.
        lines = [line for line in redirected if group in (group_of(line["test"]), "all")]
        lines = [line for line in lines if before.get(line["test"]) == "passed"]
        count = Counter(line["outcome"] for line in lines)
        compared = sum(line.get("compared", 0) for line in lines)
        cells = [len(lines), *(count[name] for name in names), compared]
        rows.append(f"| {group} | {' | '.join(map(str, cells))} |")
    refusals = [line for line in redirected if line["outcome"] == "refused" and before.get(line["test"]) == "passed"]
    reasons = Counter(generalise(line["reason"]) for line in refusals)
    rows += ["", "| reason of a refusal | tests |", "|---|---|"]
    rows += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    return "\n".join(rows)


def group_of(test: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, test.rsplit("::", 1)[-1]))


def generalise(reason: str) -> str:
    """A reason without the names and numbers of a single model."""
    return re.sub(r"\d[\d.e+-]*", "...", re.sub(r"^\w+ (?=has|keeps|uses|masks|takes|fails|cannot)", "", reason))


if __name__ == "__main__":
    main()
