"""Rollouts in TRL's GRPOTrainer, next to TRL's own generation: time, rewards, and what drafts add.

    python -m docs.measure.grpo --prompts distil_prompts.jsonl --method trl --method rollouts

Each method trains the same model on the same prompts with the same seeds. The reward is for answers of about
`LENGTH` characters, so it improves soon. Needs `pip install trl`; the default model unless `--model` names a folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from decode.models.loading import load_model
from draftless import Rollouts

LENGTH = 40  # characters
METHODS: dict[str, Any] = {  # what answers
    "trl": lambda: None,  # the trainer's own `generate`
    "rollouts": lambda: Rollouts(),
    "without drafts": lambda: Rollouts(None),
    "merged": lambda: Rollouts("merged"),
}


def reward_length(completions: list[Any], **others: Any) -> list[float]:
    """1 for an answer of `LENGTH` characters, less for others."""
    texts = [each[0]["content"] for each in completions]
    return [1 - abs(len(text) - LENGTH) / max(len(text), LENGTH) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON lines with prompt or turns")
    parser.add_argument("--method", action="append", required=True, choices=METHODS)
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--questions", type=int, default=2, help="per step")
    parser.add_argument("--answers", type=int, default=8, help="to each question")
    parser.add_argument("--different", type=int, default=16, help="questions in all; they come again")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add each run there")
    options = parser.parse_args()
    for method in options.method:
        run = train(METHODS[method](), options)
        print(json.dumps({"method": method} | {name: run[name] for name in run if name != "steps"}), flush=True)
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"method": method} | run) + "\n")


def train(rollouts: Rollouts | None, options: argparse.Namespace) -> dict[str, Any]:
    """Train; returns the rewards and seconds of generation of each step, and means of the last ten."""
    if options.model is None:
        model, tokenizer = load_model(None, dtype="float32", in_blocks=False)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    texts = [line["prompt"] if "prompt" in line else line["turns"][0] for line in lines][: options.different]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=options.questions * options.answers,
            num_generations=options.answers,
            max_completion_length=options.max_tokens,
            temperature=options.temperature,
            learning_rate=options.learning_rate,
            max_steps=options.steps,
            logging_steps=1,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(model, reward_length, args=config, train_dataset=data, processing_class=tokenizer)
        if rollouts is not None:
            rollouts.attach(trainer)
        seconds = time_generation(trainer)
        begun = perf_counter()
        trainer.train()
        lasted = perf_counter() - begun
    logs = [each for each in trainer.state.log_history if "reward" in each]
    rewards, late = [each["reward"] for each in logs], slice(-10, None)
    drafts = "spec_accept_length", "spec_accept_rate", "time_saved"
    kept = *(f"rollout/{name}" for name in drafts), "completions/mean_length"
    found = {name: [each[name] for each in logs[late] if name in each] for name in kept}
    means = {name: fmean(values) for name, values in found.items() if values}
    summary = {"generation s": sum(seconds), "after the first": sum(seconds[1:]), "training s": lasted}
    summary |= {"first rewards": fmean(rewards[:10]), "last rewards": fmean(rewards[late])}
    return summary | means | {"steps": {"rewards": rewards, "seconds": seconds, "logs": logs}}


def time_generation(trainer: Any) -> list[float]:
    """A list that gets the seconds of each generation."""
    seconds, generate = list[float](), trainer._generate_single_turn

    def timed(*inputs: Any, **settings: Any) -> Any:
        begun = perf_counter()
        found = generate(*inputs, **settings)
        seconds.append(perf_counter() - begun)
        return found

    trainer._generate_single_turn = timed
    return seconds


if __name__ == "__main__":
    main()
