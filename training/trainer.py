"""The training loop: batches in a fixed order, checkpoints, validation by decoding, and a stop in time.

One process or several, on any device that accelerate knows. With several, each takes its part of every batch, so
that the number of processes changes the speed and not the result.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from training.batches import plan_batches
from training.checkpoint import Metrics, load_checkpoint, save_checkpoint
from training.data import Dataset
from training.objective import Loss
from training.teacher import Lesson

WARMUP = 0.03  # of all steps
CLIP = 1.0  # of the gradient's norm
WEIGHT_DECAY = 0.01
LOG_EVERY = 10
EXPLODED = 3.0  # times the mean of the steps before
STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Schedule:
    """How long and how fast. `patience`: validations without a better tau before training ends early."""

    epochs: int = 1
    max_steps: int | None = None
    batch_tokens: int = 2048
    accumulate: int = 1
    lr: float = 1e-3
    seed: int = 0
    save_every: int = 200
    validate_every: int = 200
    patience: int = 10

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_tokens", "accumulate", "save_every", "validate_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr is {self.lr}; it must be a positive number")


@dataclass(frozen=True)
class Validation:
    """What decoding held-out prompts gave: tau, and the chance of a guess at each depth if the one above it held."""

    tau: float
    acceptance: list[float]


@dataclass
class Progress:
    """How far a training has come."""

    step: int = 0
    tokens: int = 0  # answer tokens seen
    best_tau: float = 0.0
    stale: int = 0  # validations since the best
    mean_loss: float | None = None


class Trainer:
    """Trains the head in an objective (a module that makes a `Loss` of a `Lesson`), writing to a folder.

    lesson(numbers): the batch of these examples. validate(): decode with the head as it is. save_best(): keep the head
    as it is. settings: what must be the same for a training to be resumed. An objective may have `rates`: the shares
    of the learning rate that some of its parts are given, by name; others have all of it.
    """

    def __init__(
        self,
        objective: torch.nn.Module,
        dataset: Dataset,
        lesson: Callable[[Sequence[int]], Lesson],
        validate: Callable[[], Validation],
        save_best: Callable[[], None],
        schedule: Schedule,
        folder: Path,
        accelerator: Accelerator,
        settings: dict[str, Any],
    ) -> None:
        self.dataset, self.lesson, self.validate, self.save_best = dataset, lesson, validate, save_best
        self.schedule, self.folder, self.accelerator, self.settings = schedule, folder, accelerator, settings
        self.weights = {name: weight for name, weight in objective.named_parameters() if weight.requires_grad}
        self.lengths = [len(example.tokens) for example in dataset.examples]
        groups = self._group(getattr(objective, "rates", {}))
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
        self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        self.steps = self._count_steps()
        self.rates = get_cosine_schedule_with_warmup(self.optimizer, int(WARMUP * self.steps) + 1, self.steps)
        self.progress = Progress()
        self._terminated = False

    def run(self, resume: bool = False) -> None:
        """Train to the end, or until validations stop improving; go on from the folder's checkpoint with `resume`.

        Raises ValueError where the loss explodes (the last checkpoint stays), SystemExit after a SIGTERM (state saved).
        """
        state = load_checkpoint(self.folder, self.settings) if resume else None
        if state is not None:
            self._restore(state)
        self.metrics = Metrics(self.folder, self.progress.step) if self.accelerator.is_main_process else None
        before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            self._train()
        finally:
            signal.signal(signal.SIGTERM, before)

    def _train(self) -> None:
        schedule, progress = self.schedule, self.progress
        started, tokens_before = perf_counter(), progress.tokens
        bar = tqdm(total=self.steps, initial=progress.step, unit=" steps", disable=not self.accelerator.is_main_process)
        with bar:
            for batch in self._remaining():
                if progress.stale >= schedule.patience:
                    break
                losses = self._step(batch)
                progress.step += 1
                speed = (progress.tokens - tokens_before) / (perf_counter() - started)
                bar.set_postfix_str(
                    f"loss {losses['loss']:.3f}, tau {progress.best_tau:.2f}, {speed:.0f} tokens/s", refresh=False
                )
                bar.update()
                if progress.step % LOG_EVERY == 0 or progress.step == self.steps:
                    self._log(**losses)
                if progress.step % schedule.validate_every == 0 or progress.step == self.steps:
                    self._validate()
                if progress.step % schedule.save_every == 0 or progress.step == self.steps or self._stopping():
                    self._save()
                if self._stopping():
                    raise SystemExit(STOPPED)

    def _step(self, batch: Sequence[Sequence[int]]) -> dict[str, Any]:
        """One step of the optimizer over a few batches of examples. Returns what is to be logged."""
        accelerator, examples = self.accelerator, self.dataset.examples
        answers = sum(examples[number].answer_tokens for numbers in batch for number in numbers)
        sums = None
        for index, numbers in enumerate(batch):
            mine = numbers[accelerator.process_index :: accelerator.num_processes]
            lesson = self.lesson(mine or numbers[:1]).to(accelerator.device)
            if not mine:  # more processes than examples: take part with nothing
                lesson.answers.zero_()
            with nullcontext() if index == len(batch) - 1 else accelerator.no_sync(self.objective):
                loss: Loss = self.objective(lesson)
                # Gradients are averaged over processes, but what is wanted is the mean over answer tokens.
                accelerator.backward(loss.total * (accelerator.num_processes / answers))
            sums = _add(sums, torch.cat([loss.total[None].detach(), loss.anchors, loss.agreed]))
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), CLIP)
        total, *counts = accelerator.reduce(sums, "sum").tolist()
        self._check(total / answers, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rates.step()
        self.progress.tokens += answers
        anchors, agreed = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        agreement = [right / max(1, count) for right, count in zip(agreed, anchors, strict=True)]
        return {"loss": total / answers, "agreement": agreement}

    def _check(self, loss: float, norm: Any) -> None:
        progress = self.progress
        mean = progress.mean_loss
        if not math.isfinite(loss + float(norm)) or (mean is not None and loss > EXPLODED * mean + 1):
            raise ValueError(
                f"the loss exploded at step {progress.step + 1} ({loss:.3g}, gradient {float(norm):.3g}); the head of "
                "the best validation and the last checkpoint are kept, try a lower --lr"
            )
        progress.mean_loss = loss if mean is None else 0.98 * mean + 0.02 * loss

    def _validate(self) -> None:
        """Decode with the head; keep it if it is the best so far. Every process takes part in none but the first's."""
        if self.accelerator.is_main_process:
            self.objective.eval()
            result = self.validate()
            self.objective.train()
            self._log(tau=result.tau, acceptance=result.acceptance)
            if result.tau > self.progress.best_tau:
                self.progress.best_tau, self.progress.stale = result.tau, 0
                self.save_best()
            else:
                self.progress.stale += 1
        stale = torch.tensor([self.progress.stale], device=self.accelerator.device)
        self.progress.stale = int(_broadcast(self.accelerator, stale))

    def _log(self, **row: Any) -> None:
        if self.metrics is not None:
            self.metrics.add(step=self.progress.step, tokens=self.progress.tokens, **row)

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            state = {
                "settings": self.settings,
                "progress": asdict(self.progress),
                "weights": {name: weight.detach() for name, weight in self.weights.items()},
                "optimizer": self.optimizer.state_dict(),
                "rates": self.rates.state_dict(),
                "random": torch.get_rng_state(),
            }
            save_checkpoint(self.folder, state)
        self.accelerator.wait_for_everyone()

    def _restore(self, state: dict[str, Any]) -> None:
        self.progress = Progress(**state["progress"])
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rates.load_state_dict(state["rates"])
        torch.set_rng_state(state["random"])

    def _group(self, shares: Mapping[str, float]) -> list[dict[str, Any]]:
        """The weights by their learning rates, as an optimizer takes them."""
        groups: dict[float, list[Tensor]] = {}
        for name, weight in self.weights.items():
            groups.setdefault(shares.get(name.split(".")[0], 1.0), []).append(weight)
        return [{"params": weights, "lr": self.schedule.lr * share} for share, weights in groups.items()]

    def _count_steps(self) -> int:
        steps = sum(
            math.ceil(
                len(plan_batches(self.lengths, self.schedule.batch_tokens, self.schedule.seed, epoch))
                / self.schedule.accumulate
            )
            for epoch in range(self.schedule.epochs)
        )
        return steps if self.schedule.max_steps is None else min(steps, self.schedule.max_steps)

    def _remaining(self) -> Iterator[list[list[int]]]:
        """What each step from here on trains on: `accumulate` batches of examples."""
        size, at = self.schedule.accumulate, 0
        for epoch in range(self.schedule.epochs):
            batches = plan_batches(self.lengths, self.schedule.batch_tokens, self.schedule.seed, epoch)
            for begin in range(0, len(batches), size):
                if at >= self.steps:
                    return
                if at >= self.progress.step:
                    yield batches[begin : begin + size]
                at += 1

    def _stopping(self) -> bool:
        """Whether any process was asked to stop."""
        if self.accelerator.num_processes == 1:
            return self._terminated
        asked = torch.tensor([int(self._terminated)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, "sum").item())

    def _terminate(self, *_: Any) -> None:
        self._terminated = True


def _add(sums: Tensor | None, more: Tensor) -> Tensor:
    return more if sums is None else sums + more


def _broadcast(accelerator: Accelerator, value: Tensor) -> float:
    """The main process's value."""
    mine = value if accelerator.is_main_process else torch.zeros_like(value)
    return float(accelerator.reduce(mine, "sum").item())
