"""From a model to a small trained head: distill answers, train, calibrate, generate. About two minutes on a CPU.

    python examples/train_tiny_head.py [MODEL [FOLDER]]

The head sees far too little data to draft well: this shows the steps, not a result.
"""

import json
import sys
from pathlib import Path

from draftless_commands import calibrate, distill, generate, train

THINGS = ("rain", "wind", "snow", "stars", "bread", "glass", "paper", "music", "bridges", "clocks", "salt", "bees")
QUESTIONS = ("Explain {} in three sentences.", "Write a short poem about {}.", "List four facts about {}.")


def main(name: str | None = None, folder: str = "tiny-head") -> None:
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    prompts, answers, head = (str(root / file) for file in ("prompts.jsonl", "answers.jsonl", "my-head"))
    asked = [question.format(thing) for thing in THINGS for question in QUESTIONS]
    Path(prompts).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    model = ["--model", name] if name else []

    distill.main([prompts, *model, "--out", answers, "--max-new-tokens", "64"])
    size = ["--heads", "2", "--layers", "1", "--output", "target"]
    steps = ["--epochs", "2", "--max-steps", "40", "--batch-tokens", "512", "--validation", "2"]
    train.main(["--kind", "medusa", *model, "--data", answers, "--out", head, *size, *steps])
    calibrate.main([*model, "--head", head, "--prompt-file", prompts, "--limit", "4", "--max-new-tokens", "32"])
    generate.main([*model, "--proposer", "medusa", "--head", head, "--prompt", asked[0], "--max-new-tokens", "64"])


if __name__ == "__main__":
    main(*sys.argv[1:])
