"""Rollouts: a trainer's model answers its own prompts, drafted, while its weights change from step to step.

TRL's trainers are served in two ways. `GRPOTrainer(..., rollout_func=Rollouts())` asks for answers with their
log-probabilities. `Rollouts().attach(trainer)` takes the place of `model.generate`, which all of them call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from decode import Answer, Engine, Sampling, Stats, Target
from decode.models.compatibility import unwrap
from decode.proposer import GivenProposer, check_proposer
from decode.request import Request, read_requests

__all__ = ["Rollouts"]
SAMPLING = "temperature", "top_k", "top_p", "min_p"
HONOURED = {*SAMPLING, "do_sample", "repetition_penalty", "max_new_tokens"}
WITHOUT_EFFECT = {  # on the tokens of an answer
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "disable_compile", "cache_implementation"),
    *("transformers_version", "max_length", "trust_remote_code"),
}
METRICS = "rollout/spec_accept_rate", "rollout/spec_accept_length", "rollout/time_saved"


class Rollouts:
    """Answers to the prompts of a trainer, from the model that it trains. Lossless, as `generate` is.

    proposer: as in `decode.stream`. It is kept, so it draws on what earlier answers taught it.
    rows: answers that are decoded together; others wait, and join as these end. Equal prompts are read once.
    nodes, accelerate: as in `Engine` and `Target`. Packed copies follow the weights before each call.

    Answers are sampled in the dtype of the model's weights, without autocast, and in evaluation mode. They are the same
    for the same `seed` of the trainer's arguments at the same step, with every deterministic proposer. metrics: of the
    last call, under verl's names: the accepted share of draft tokens, tau, and the share of decoding time that drafts
    saved, by the cost curve. GRPOTrainer and RLOOTrainer log them.

    Raises ValueError for a model that cannot be a target, for settings of generation that it does not know, and for
    images; the error of an answer that failed.
    """

    def __init__(
        self,
        proposer: GivenProposer = "auto",
        *,
        rows: int = 16,
        nodes: int = 64,
        accelerate: str = "auto",
    ) -> None:
        check_proposer(proposer)
        self.proposer, self.rows, self.nodes, self.accelerate = proposer, rows, nodes, accelerate
        self.metrics: dict[str, float] = {}
        self._engine: Engine | None = None
        self._model: PreTrainedModel | None = None  # of the engine
        self._calls = -1, 0  # the last step of the trainer, and the calls in it

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: an answer to each prompt, in the order of the prompts.

        prompts: texts or conversations. Log-probabilities are those of the trainer's own pass: at its temperature,
        before top-k, top-p and penalties.
        """
        answers = self.answer(_encode(prompts, trainer), trainer, trainer.generation_config, log_probs=True)
        return {
            "prompt_ids": [answer.prompt for answer in answers],
            "completion_ids": [answer.tokens for answer in answers],
            "logprobs": [[each.chosen for each in answer.log_probs] for answer in answers],
        }

    def attach(self, trainer: Any) -> None:
        """Let `generate` of the trainer's model answer like this. Undone by `del trainer.model.generate`.

        Raises ValueError if the trainer generates in another way.
        """
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(trainer, name, False) is True:
                raise ValueError(f"with {name}, the trainer does not call generate; leave {name} out")

        def generate(
            input_ids: Tensor,
            attention_mask: Tensor | None = None,
            generation_config: GenerationConfig | None = None,
            **others: Any,
        ) -> Tensor:
            if given := [name for name, value in others.items() if value is not None]:
                raise ValueError(f"rollouts cannot honour {given[0]}; leave it out, or do not attach them")
            config = trainer.model.generation_config if generation_config is None else generation_config
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            prompts = [row[real.bool()].tolist() for row, real in zip(input_ids, mask, strict=True)]
            answers = [torch.tensor(each.tokens) for each in self.answer(prompts, trainer, config)]
            padded = pad_sequence(answers, batch_first=True, padding_value=trainer.generation_config.pad_token_id)
            return torch.cat([input_ids, padded.to(input_ids)], dim=1)

        trainer.model.generate = generate

    def answer(
        self, prompts: Sequence[Sequence[int]], trainer: Any, config: GenerationConfig, log_probs: bool = False
    ) -> list[Answer]:
        """An answer to each prompt, which is a list of token ids.

        config: how transformers would generate it; its model's own config stands in for what is None. log_probs: those
        of the tokens are wanted.
        """
        model = unwrap(trainer.model)
        config = _fill(config, model)
        sampling, ends = _read_sampling(config, self._next_seed(trainer)), config.eos_token_id
        with _evaluating(model):
            engine = self._follow(model)
            ends = [ends] if isinstance(ends, int) else ends or []
            requests = read_requests(
                engine.target,
                prompts,
                sampling=sampling,
                max_new_tokens=config.max_new_tokens,
                stop_ids=[end for end in ends if 0 <= end < engine.target.vocabulary],  # a model's -1 means none
                nodes=self.nodes,
                text=False,
                log_probs=0 if log_probs else None,
            )
            for request in requests:
                request.log_probs_at = sampling.temperature or 1.0
            try:
                self.metrics = _run(engine, requests)
            except BaseException:
                engine.close()
                self._engine = None
                raise
            answers = [_read_answer(request) for request in requests]
        for mode in getattr(trainer, "_metrics", {}).keys() & {"train" if trainer.model.training else "eval"}:
            for name, value in self.metrics.items():
                trainer._metrics[mode][name].append(value)
        return answers

    def _next_seed(self, trainer: Any) -> int:
        """Of the trainer's seed, its step, the call in that step, and the process."""
        step, calls = self._calls
        now = trainer.state.global_step
        self._calls = now, calls + 1 if now == step else 0
        numbers = trainer.args.seed, *self._calls, trainer.accelerator.process_index
        return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7])

    def _follow(self, model: PreTrainedModel) -> Engine:
        """The engine, for the weights as they are now."""
        engine, self._engine = self._engine, None
        if engine is not None and self._model is model:
            with suppress(ValueError):  # if it has another form, a new target is made
                engine.target.weights_changed()
                self._engine = engine
                return engine
        if engine is not None:
            engine.close()
        del engine  # and its copy of the weights
        target = Target(model, accelerate=self.accelerate)
        self._engine, self._model = Engine(target, self.proposer, rows=self.rows, nodes=self.nodes), model
        return self._engine


def _run(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """Run requests to their end. Returns the metrics."""
    engine.submit(requests)
    total, plain, stats = 0.0, 0.0, Stats()
    while engine.is_busy:
        for _, group in groupby(engine.step(), lambda chunk: id(chunk.stats.seconds)):  # of one pass
            chunks = [*group]
            rows, seconds, sizes = len(chunks), chunks[0].stats.seconds, [chunk.stats.nodes for chunk in chunks]
            nodes = 1 + (sum(sizes) / rows if engine.target.passes_flat else max(sizes))
            cost = engine.target.cost_curve(rows)(nodes) if nodes > 1 else 1.0
            total += seconds.total
            plain += sum(len(chunk.tokens) for chunk in chunks) / rows * (seconds.total - seconds.proposer) / cost
    if engine.prefixes is not None:  # the next step of training makes them void
        engine.prefixes.clear()
    for request in requests:
        stats.add(request.stats)
    accepted = sum(stats.accepted_by_depth) / max(stats.nodes, 1)
    return dict(zip(METRICS, (accepted, stats.tau, 1 - total / plain if plain else 0.0), strict=True))


def _read_answer(request: Request) -> Answer:
    assert request.answer is not None
    if request.answer.exception is not None:
        raise request.answer.exception
    return request.answer


def _fill(config: GenerationConfig, model: PreTrainedModel) -> GenerationConfig:
    """A config with the model's own settings in place of None, and then transformers' defaults, as in `generate`."""
    filled = deepcopy(config)
    for settings in (vars(model.generation_config), GenerationConfig._get_default_generation_params()):
        for name, value in settings.items():
            if name[0] != "_" and getattr(filled, name, None) is None:
                setattr(filled, name, value)
    return filled


def _read_sampling(config: GenerationConfig, seed: int) -> Sampling:
    """Raises ValueError for settings that are not honoured."""
    usual = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    for name, value in vars(config).items():
        is_known = name in HONOURED or name in WITHOUT_EFFECT or name.startswith("_")
        if not is_known and value and value != usual.get(name):
            raise ValueError(f"rollouts cannot honour {name}={value!r} of the generation config; leave it out")
    if config.max_new_tokens is None:
        raise ValueError("rollouts need max_new_tokens in the generation config; max_length is not read")
    penalty = config.repetition_penalty
    processors = [] if penalty in (None, 1.0) else [RepetitionPenaltyLogitsProcessor(penalty)]
    if not config.do_sample:
        return Sampling(processors=processors)
    given = {name: value for name in SAMPLING if (value := getattr(config, name)) is not None}
    return Sampling(**{"temperature": 1.0} | given, processors=processors, seed=seed)


def _encode(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """The token ids of texts or conversations, as TRL's trainers make them."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return tokenizer(text=list(prompts))["input_ids"]
    contents = (message["content"] for prompt in prompts for message in prompt)
    kinds = {part["type"] for content in contents if isinstance(content, list) for part in content} - {"text"}
    if kinds:
        raise ValueError(f"a prompt has a part of type {min(kinds)}; rollouts take text alone")
    options = {name: getattr(trainer, name, None) or None for name in ("chat_template", "tools")}
    options |= getattr(trainer, "chat_template_kwargs", {})
    encoded = tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, return_dict=True, **options)
    return encoded["input_ids"]


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """A model in evaluation mode, without the autocast that accelerate puts around its forward pass."""
    training, forward = [each for each in model.modules() if each.training], vars(model).pop("forward", None)
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        if forward is not None:
            model.forward = forward
