"""Reinforcement learning with TRL: the same training, with faster answers. Needs `pip install trl`.

python examples/grpo_rollouts.py [MODEL] [STEPS]
"""

import sys
import tempfile

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from draftless import Rollouts, Target

QUESTIONS = ["Name a colour.", "Name a fruit.", "Name an animal.", "Name a city."]


def is_short(completions: list, **others: object) -> list[float]:
    """The reward: 1 for an answer without a character, 0 for one of 200."""
    return [1 - len(answer[0]["content"]) / 200 for answer in completions]


def main(name: str | None = None, steps: int = 4) -> None:
    stock = Target.load(name, dtype="float32", accelerate="off")  # or load a model with transformers
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": each}]} for each in QUESTIONS])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=24,
            max_steps=steps,
            logging_steps=1,
            bf16=False,
            report_to="none",
            save_strategy="no",
        )
        trainer = GRPOTrainer(stock.model, is_short, config, data, processing_class=stock.tokenizer)
        Rollouts().attach(trainer)  # the only line that is not TRL's
        trainer.train()
        rows = [each for each in trainer.state.log_history if "reward" in each]
    for row in rows:
        print(f"step {row['step']}: reward {row['reward']:.2f}, tau {row['rollout/spec_accept_length']:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:]))
