"""The training loop: batches in a fixed order, checkpoints, validation by decoding, early stopping.

Each of several processes takes its share of every batch: their number changes the speed but, except for rounding and
random noise, not the result.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, send_to_device
from torch import Tensor
from torch.optim import AdamW, Optimizer
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from decode.devices.backend import find_backend
from training.checkpoint import Metrics, save_checkpoint
from training.data import Dataset
from training.objectives import Loss
from training.teacher import Batch

WARMUP = 0.03  # of all steps
MAX_NORM = 1.0  # of the gradient
WEIGHT_DECAY = 0.01
MOMENTUM = 0.95
MUON_RMS = 0.2  # by how much a weight moves on average, relative to the rate (Liu et al. 2025)
MUON_SCALE = 5.0  # times the learning rate: a weight moves as AdamW lets it in its first steps
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of Jordan et al. 2024
VOCABULARIES = {"lm_head", "lm_heads", "embed_tokens", "markov_head"}
LOG_EVERY = 10
EXPLODED = 3.0  # times the mean loss so far
STOPPED = 128  # plus the signal's number


@dataclass(frozen=True)
class Schedule:
    """Length and speed of training. `patience`: validations without a better tau before training stops early."""

    epochs: int = 1
    max_steps: int | None = None
    batch_tokens: int = 2048
    lr: float = 1e-3
    seed: int = 0
    save_every: int = 200
    validate_every: int = 200
    patience: int = 10

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """The batch of each step, as example numbers. lengths: the number of tokens in each example."""
        epochs = (plan_batches(lengths, self.batch_tokens, self.seed, epoch) for epoch in range(self.epochs))
        return [*islice(chain.from_iterable(epochs), self.max_steps)]


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch as lists of example numbers; every example occurs once.

    A batch is a rectangle [B, T] of at most `batch_tokens` tokens; a longer example gets a batch of its own. Examples
    are shuffled, then sorted by length within pools of about 64 batches: padding stays at a few per cent.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = max(1, 64 * batch_tokens * len(lengths) // max(1, sum(lengths)))
    batches: list[list[int]] = []
    for begin in range(0, len(order), pool):
        batch: list[int] = []
        for number in sorted(order[begin : begin + pool], key=lambda number: lengths[number]):
            if batch and (len(batch) + 1) * lengths[number] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(number)
        batches.append(batch)
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[index] for index in shuffled]


@dataclass(frozen=True)
class Validation:
    """Decoding held-out prompts: tau, and by depth the share of draft tokens accepted if the one above was."""

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


@dataclass
class Trainer:
    """Trains the head in an objective, a module from `Batch` to `Loss`, and writes checkpoints to a folder.

    An objective may have `rate_shares`, see `make_optimizers`.
    """

    objective: torch.nn.Module
    dataset: Dataset
    load_batch: Callable[[Sequence[int]], Batch]  # the batch of the examples with these numbers
    validate: Callable[[], Validation]  # decodes with the current head
    save_best: Callable[[], None]  # saves the current head
    schedule: Schedule
    folder: Path
    accelerator: Accelerator
    settings: dict[str, Any]  # must be equal to resume

    def __post_init__(self) -> None:
        self.weights = {name: weight for name, weight in self.objective.named_parameters() if weight.requires_grad}
        self.batches = self.schedule.plan([len(example.tokens) for example in self.dataset.examples])
        optimizers = make_optimizers(self.weights, self.schedule.lr, getattr(self.objective, "rate_shares", {}))
        self.objective, *self.optimizers = self.accelerator.prepare(self.objective, *optimizers)
        self.steps = len(self.batches)
        # last_epoch=0 skips the schedule's first step, in which the learning rate is zero.
        length = int(WARMUP * self.steps) + 1, self.steps + 1
        self.lr_schedulers = [get_cosine_schedule_with_warmup(one, *length, last_epoch=0) for one in self.optimizers]
        self.progress = Progress()
        self._signal = 0  # that asked it to stop

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or tau has stopped growing."""
        return self.progress.step == self.steps or self.progress.stale >= self.schedule.patience

    def describe(self) -> str:
        """The progress in one line."""
        progress = self.progress
        end = "" if progress.step == self.steps else f", then {progress.stale} validations without a better one"
        return f"{self.folder}: {progress.step} of {self.steps} steps, tau {progress.best_tau:.2f} at best{end}"

    def run(self, state: Mapping[str, Any] | None = None, begin_with_best: bool = False) -> int:
        """Train from the beginning or a checkpoint's `state` to the end, or until tau stops growing. Returns the number
        of steps made.

        begin_with_best: validate first; later heads are saved only if they beat this one. Raises ValueError if the
        loss explodes (saved files stay), SystemExit after SIGTERM or SIGINT (with a checkpoint).
        """
        if state is not None:
            self._restore(state)
        first = self.progress.step
        if len(self._gather(first)) > 1:
            raise ValueError(f"not every process finds the checkpoint in {self.folder}: it must be on a shared disk")
        self.metrics = Metrics(self.folder, first) if self.accelerator.is_main_process else None
        signals = signal.SIGTERM, signal.SIGINT
        previous = [signal.signal(each, self._stop) for each in signals]
        try:
            if state is None and begin_with_best:
                self._validate()
            self._train()
        finally:
            for each, handler in zip(signals, previous, strict=True):
                signal.signal(each, signal.SIG_DFL if handler is None else handler)  # None: set by C code
        return self.progress.step - first

    def _stop(self, number: int, frame: object) -> None:
        """Stop after this step, with a checkpoint. A second Ctrl-C ends it at once."""
        self._signal = number
        if number == signal.SIGINT and self.accelerator.is_main_process:
            print("\ndraftless: stopping after this step; Ctrl-C again ends at once", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _train(self) -> None:
        schedule, progress = self.schedule, self.progress
        started, tokens_before = perf_counter(), progress.tokens
        silent = self.finished or not self.accelerator.is_main_process
        interval = 1 if sys.stderr.isatty() else 60  # one line a minute in a log
        with tqdm(total=self.steps, initial=progress.step, unit=" steps", mininterval=interval, disable=silent) as bar:
            for numbers in self.batches[progress.step :]:
                if self.finished:
                    return
                losses = self._step(numbers)
                progress.step += 1
                speed = (progress.tokens - tokens_before) / (perf_counter() - started)
                shown = f"loss {losses['loss']:.3f}, tau {progress.best_tau:.2f}, {speed:.0f} tokens/s"
                bar.set_postfix_str(shown, refresh=False)
                bar.update()
                last = progress.step == self.steps
                if last or progress.step % LOG_EVERY == 0:
                    self._log(**losses)
                if last or progress.step % schedule.validate_every == 0:
                    self._validate()
                stopping = max(self._gather(self._signal))  # of any process
                if progress.step % schedule.save_every == 0 or self.finished or stopping:
                    self._save()
                if stopping:
                    raise SystemExit(STOPPED + stopping)

    def _step(self, numbers: Sequence[int]) -> dict[str, Any]:
        """One optimizer step over a batch of examples, given by their numbers. Returns values to log."""
        accelerator = self.accelerator
        mine = numbers[accelerator.process_index :: accelerator.num_processes]
        batch = send_to_device(self.load_batch(mine or numbers[:1]), accelerator.device, non_blocking=True)
        if not mine:  # more processes than examples: take part without anchors
            batch.answers.zero_()
        answers = int(accelerator.reduce(batch.answers.sum(), "sum"))
        with find_backend(accelerator.device).running():  # nearly every batch has a length of its own
            loss: Loss = self.objective(batch)
            # Gradients are averaged over processes; we want the mean over answer tokens.
            accelerator.backward(loss.total * (accelerator.num_processes / answers))
        norm = accelerator.clip_grad_norm_(self.objective.parameters(), MAX_NORM)
        sums = torch.cat([loss.total[None].detach(), loss.anchors, loss.agreed])
        total, *counts = accelerator.reduce(sums, "sum").tolist()
        self._check_loss(total / answers, float(norm))
        for optimizer, lr_scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        self.progress.tokens += answers
        depths = len(counts) // 2
        agreement = [right / max(1, count) for count, right in zip(counts[:depths], counts[depths:], strict=True)]
        return {"loss": total / answers, "agreement": agreement}

    def _check_loss(self, loss: float, norm: float) -> None:
        progress, mean = self.progress, self.progress.mean_loss
        if not math.isfinite(loss + norm) or (mean is not None and loss > EXPLODED * mean + 1):
            raise ValueError(
                f"the loss exploded at step {progress.step + 1} ({loss:.3g}, gradient {norm:.3g}); {self.folder} keeps "
                "what was saved before; begin anew with a lower --lr, from the best head, if there is one, with --init"
            )
        progress.mean_loss = loss if mean is None else 0.98 * mean + 0.02 * loss

    def _validate(self) -> None:
        """Decode with the head, and save it if it is the best so far. The first process does this; others wait."""
        if self.accelerator.is_main_process:
            self.objective.eval()
            result = self.validate()
            self.objective.train()
            self._log(tau=result.tau, acceptance=result.acceptance)
            self.progress.stale += 1
            if result.tau > self.progress.best_tau:
                self.progress.best_tau, self.progress.stale = result.tau, 0
                self.save_best()
        self.progress.stale = int(broadcast(torch.tensor([self.progress.stale], device=self.accelerator.device)))

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
                "rates": [lr_scheduler.state_dict() for lr_scheduler in self.lr_schedulers],
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
        for name, parts in (("optimizers", self.optimizers), ("rates", self.lr_schedulers)):
            for part, saved in zip(parts, state[name], strict=True):
                part.load_state_dict(saved)
        torch.set_rng_state(state["random"])
        if len(state["random_cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["random_cuda"])

    def _gather(self, value: int) -> set[int]:
        """The values of all processes."""
        return set(self.accelerator.gather(torch.tensor([int(value)], device=self.accelerator.device)).tolist())


def make_optimizers(
    weights: Mapping[str, Tensor], lr: float, rate_shares: Mapping[str, float] = MappingProxyType({})
) -> list[Optimizer]:
    """Muon for matrices between hidden states, AdamW for vocabularies, norms and biases; one without weights is left
    out.

    Muon makes a matrix's step equally long in all directions (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).
    It learns more from the same number of texts.
    rate_shares: factors of the learning rate for some weights, by the first part of their names. AdamW takes these:
    each is half of a low-rank matrix.
    """
    hidden: list[Tensor] = []
    others: dict[float, list[Tensor]] = {}  # by their share of the learning rate
    for name, weight in weights.items():
        share = rate_shares.get(name.split(".")[0])
        if share is None and is_hidden(name, weight):
            hidden.append(weight)
        else:
            others.setdefault(share or 1.0, []).append(weight)
    optimizers: list[Optimizer] = []
    if hidden:
        groups: list[Any] = [{"params": hidden, "initial_lr": MUON_SCALE * lr}]
        decay = WEIGHT_DECAY / MUON_SCALE
        optimizers.append(Muon(groups, {"lr": MUON_SCALE * lr, "weight_decay": decay}))
    if others:
        groups = [{"params": part, "lr": share * lr, "initial_lr": share * lr} for share, part in others.items()]
        optimizers.append(AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY))
    return optimizers


class Muon(Optimizer):
    """Muon with Nesterov momentum. torch's computes in bfloat16, which took nine tenths of the time on slow CPUs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                state, rate = self.state[weight], group["lr"]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                momentum = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonalize(weight.grad.lerp(momentum, MOMENTUM))
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * MUON_RMS * max(weight.shape) ** 0.5)


def orthogonalize(gradient: Tensor) -> Tensor:
    """The quintic Newton-Schulz iteration of Muon, which brings singular values near 1.

    In bfloat16 where the device is fast at it.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = gradient.shape[0] > gradient.shape[1]
    found = gradient.bfloat16() if find_backend(gradient.device).is_fast_in_bfloat16 else gradient
    found = found.T if is_tall else found
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def is_hidden(name: str, weight: Tensor) -> bool:
    """Whether the weight with this name is a matrix from hidden states to hidden states."""
    return weight.ndim == 2 and VOCABULARIES.isdisjoint(name.split("."))
