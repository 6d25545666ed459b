"""Where a staged draft is worth it: a cost model of a large target, a draft model, and n-grams that draft for that.

    python -m docs.measure.staged QUESTIONS [--limit N] [--cost C] [--out FILE]

QUESTIONS: a file in Spec-Bench's format. Measured: the tokens of a pass of the default model with n-grams, by task. The
rest is arithmetic: a step is a pass of the target and the passes of the draft model for k tokens, and takes as long for
a few nodes as for one, as on a GPU. cost: of a pass of the draft model, in passes of the target; 0.1 is 7B for 70B.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from decode import Target, stream
from draftless_commands.benchmark.files import find_commit
from proposers import NGramProposer

LENGTH, NEW_TOKENS = 4, 128
RATES = (0.6, 0.7, 0.8, 0.9)  # the probability that a drafted token is right if those before it are
TAUS = (1.0, 1.2, 1.5, 2.0, 3.0)  # tokens of a pass of the draft model; 1: it drafts alone
LONGEST = 16


def measure_ngrams(file: Path, limit: int | None) -> dict[str, float]:
    """By task: tokens of a pass of the default model with chains of n-grams; and of all."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // limit)][:limit] if limit else rows
    target = Target.load()
    prompts = [row["turns"][0] for row in rows]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for chunk in stream(target, prompts, NGramProposer(length=LENGTH), batch_size=1, max_new_tokens=NEW_TOKENS):
        if chunk.answer is not None:
            for task in (rows[chunk.request_id].get("category", "all"), "all"):
                counts[task][0] += chunk.answer.stats.tokens
                counts[task][1] += chunk.answer.stats.steps
    return {task: round(tokens / steps, 2) for task, (tokens, steps) in sorted(counts.items())}


def find_speed_up(rate: float, tau: float, cost: float) -> tuple[float, int]:
    """Tokens for the time of a target pass, and the number of drafted tokens with which they are most."""
    accepted = accumulate(rate**level for level in range(1, LONGEST + 1))
    best = ((1 + right) / (1 + count / tau * cost) for count, right in enumerate(accepted, start=1))
    return max((speed, count) for count, speed in enumerate(best, start=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--cost", type=float, default=0.1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    table = [
        {
            "rate": rate,
            **{str(tau): [round(speed, 2), k] for tau in TAUS for speed, k in [find_speed_up(rate, tau, args.cost)]},
        }
        for rate in RATES
    ]
    report: dict[str, Any] = {"commit": find_commit(), "cost": args.cost, "table": table}
    report["tokens of a pass with n-grams"] = measure_ngrams(args.questions, args.limit)
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
