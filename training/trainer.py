"""The training loop: batches in a fixed order, checkpoints, validation by decoding, and a stop in time.

One process or several, on any device that accelerate knows. With several, each takes its part of every batch, so
that the number of processes changes the speed and, but for rounding and the noise of --noise, not the result.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from training.checkpoint import Metrics, save_checkpoint
from training.data import Dataset
from training.objective import Loss
from training.optimizer import make_optimizers
from training.schedule import Schedule
from training.teacher import Lesson

WARMUP = 0.03  # of all steps
CLIP = 1.0  # of the gradient's norm
LOG_EVERY = 10
EXPLODED = 3.0  # times the mean of the steps before
STOPPED = 128 + signal.SIGTERM


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
        optimizers = make_optimizers(self.weights, schedule.lr, getattr(objective, "rates", {}))
        self.objective, *self.optimizers = accelerator.prepare(objective, *optimizers)
        self.steps = sum(1 for _ in schedule.plan(self.lengths))
        # From its second step on: at the first one the rate would be zero.
        warmup = int(WARMUP * self.steps) + 1
        self.rates = [
            get_cosine_schedule_with_warmup(optimizer, warmup, self.steps + 1, last_epoch=0)
            for optimizer in self.optimizers
        ]
        self.progress = Progress()
        self._terminated = False

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: all steps were made, or tau has stopped growing."""
        return self.progress.step == self.steps or self.progress.stale >= self.schedule.patience

    def run(self, state: Mapping[str, Any] | None = None, begin_with_best: bool = False) -> int:
        """Train to the end, or until tau stops growing; go on from a checkpoint's `state`. Returns the steps made.

        begin_with_best: the head that there is at the beginning is the one to be beaten.

        Raises ValueError where the loss explodes (what was saved stays), SystemExit after a SIGTERM (state saved).
        """
        if state is not None:
            self._restore(state)
        self._check_together()
        begun = self.progress.step
        self.metrics = Metrics(self.folder, begun) if self.accelerator.is_main_process else None
        before = signal.signal(signal.SIGTERM, self._terminate)
        try:
            if state is None and begin_with_best:
                self._validate()
            self._train()
        finally:
            signal.signal(signal.SIGTERM, before)
        return self.progress.step - begun

    def _train(self) -> None:
        schedule, progress = self.schedule, self.progress
        started, tokens_before = perf_counter(), progress.tokens
        silent = self.finished or not self.accelerator.is_main_process
        interval = 1 if sys.stderr.isatty() else 60  # in a log, a line a minute is enough
        with tqdm(total=self.steps, initial=progress.step, unit=" steps", mininterval=interval, disable=silent) as bar:
            for batch in islice(schedule.plan(self.lengths), progress.step, None):
                if self.finished:
                    return
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
                stopping = self._stopping()
                if progress.step % schedule.save_every == 0 or self.finished or stopping:
                    self._save()
                if stopping:
                    raise SystemExit(STOPPED)

    def _step(self, batch: Sequence[Sequence[int]]) -> dict[str, Any]:
        """One step of the optimizers over a few batches of examples. Returns what is to be logged."""
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
        self._check_loss(total / answers, float(norm))
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        self.progress.tokens += answers
        anchors, agreed = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        agreement = [right / max(1, count) for right, count in zip(agreed, anchors, strict=True)]
        return {"loss": total / answers, "agreement": agreement}

    def _check_loss(self, loss: float, norm: float) -> None:
        progress = self.progress
        mean = progress.mean_loss
        if not math.isfinite(loss + norm) or (mean is not None and loss > EXPLODED * mean + 1):
            raise ValueError(
                f"the loss exploded at step {progress.step + 1} ({loss:.3g}, gradient {norm:.3g}); {self.folder} keeps "
                "what was saved before; begin anew with a lower --lr, from the best head, if there is one, with --init"
            )
        progress.mean_loss = loss if mean is None else 0.98 * mean + 0.02 * loss

    def _check_together(self) -> None:
        """Raise ValueError where processes would go on from different steps."""
        step = torch.tensor([self.progress.step], device=self.accelerator.device)
        if len(set(self.accelerator.gather(step).tolist())) > 1:
            raise ValueError(f"not every process finds the checkpoint in {self.folder}: it must be on a shared disk")

    def _validate(self) -> None:
        """Decode with the head, and keep it if it is the best so far. The first process does it, the others wait."""
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
        self.progress.stale = int(broadcast(stale))

    def _log(self, **row: Any) -> None:
        if self.metrics is not None:
            self.metrics.add(step=self.progress.step, tokens=self.progress.tokens, **row)

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            state = {
                "settings": self.settings,
                "progress": asdict(self.progress),
                "weights": {name: weight.detach() for name, weight in self.weights.items()},
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "rates": [rate.state_dict() for rate in self.rates],
                "random": torch.get_rng_state(),
                "random_cuda": torch.cuda.get_rng_state_all(),
            }
            save_checkpoint(self.folder, state)
        self.accelerator.wait_for_everyone()

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.progress = Progress(**state["progress"])
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state["weights"][name])
        for name, parts in (("optimizers", self.optimizers), ("rates", self.rates)):
            for part, saved in zip(parts, state[name], strict=True):
                part.load_state_dict(saved)
        torch.set_rng_state(state["random"])
        if len(state["random_cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["random_cuda"])

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
