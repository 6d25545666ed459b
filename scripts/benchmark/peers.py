"""What methods are compared with: transformers' own `generate`, and other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StoppingCriteriaList

from decode import Target
from decode.models.fingerprint import fingerprint_vocabulary
from decode.models.loading import FIXED16, check_model
from decode.requests.text import Tokenizer
from draftless_commands.benchmark.measurement import Ask, Measured, Method, RefusedError, TokenIds, clock
from draftless_commands.shared.options import ModelOptions, load_model_only
from proposers.own_class import find_own, is_own_class

# Transformers' own methods, and their arguments of `generate`.
COMPILED = "hf-compiled"
PEERS: dict[str, dict[str, Any]] = {
    "hf": {},
    COMPILED: {"cache_implementation": "static"},
    "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
}
SMALLEST_CACHE = 256  # slots of a static cache


class OwnMethod(Protocol):
    """Another program to compare with: a class in a file of one's own, made without arguments.

    version: its name and version, which name its row. What a call raises is shown there, instead of results.
    """

    version: str

    def load(self, model: PreTrainedModel, tokenizer: Tokenizer | None) -> None:
        """Prepare, before anything is timed.

        model: the target as transformers runs it, a copy of modules that may be changed; its weights are shared. Its
        generation config has the end tokens and, at temperatures above 0, `do_sample` and `temperature`.
        """

    def answer(self, prompts: TokenIds, max_new_tokens: int) -> Sequence[Sequence[Sequence[int]]]:
        """For each prompt, the tokens that each forward pass of the target added, the end token included."""


def is_own_method(name: str) -> bool:
    """Whether FILE.py:CLASS is an `OwnMethod`. Raises ValueError as `find_own` does."""
    return is_own_class(name) and all(hasattr(find_own(name), member) for member in ("load", "answer"))


def check_peer(text: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that is no setting of transformers' `generate`, and for a missing draft model."""
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_") and name != "transformers_version"}
    for option, value in options.items():
        if option == "draft_model":
            check_model(value)
        elif option not in known:
            hint = "; give draft_model=MODEL" if option == "assistant_model" else ""
            raise ValueError(f"{text}: transformers' generate has no setting {option}{hint}")


def load_stock(target: Target, options: ModelOptions, temperature: float) -> PreTrainedModel:
    """An unaccelerated copy of the model for all peers.

    Of its generation config only the end tokens are kept: penalties or top-k would give peers another distribution than
    the project's loop. transformers rounds no inputs to 16 bits: for fixed16 its weights are in float32.
    """
    dtype = None if options.dtype == FIXED16 else options.dtype
    model, tokenizer = load_model_only(replace(options, dtype=dtype))
    stops = sorted(target.stop_ids)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(stops), 0)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    model.generation_config = GenerationConfig(eos_token_id=stops or None, pad_token_id=pad, **sampling)
    return model


def make_peer(
    stock: PreTrainedModel, tokenizer: Tokenizer | None, model: ModelOptions, name: str, options: Mapping[str, Any]
) -> Method:
    """Hugging Face's `generate`, which keeps nothing between calls but compiled code.

    model: options for loading a draft model. options: the method's own.
    """
    settings = PEERS[name] | options
    if name == COMPILED:
        settings["compile_config"] = CompileConfig(dynamic=False)  # one graph for each size of the cache
        settings["compile_config"]._compile_all_devices = True  # on a CPU it does not compile otherwise
        ready = set[int]()
        return lambda _: partial(ask_compiled, stock, settings, ready)
    if assistant := settings.pop("draft_model", None):
        settings["assistant_model"], other = load_model_only(replace(model, model=assistant))
        if tokenizer is not None and fingerprint_vocabulary(other) != fingerprint_vocabulary(tokenizer):
            settings |= {"tokenizer": tokenizer, "assistant_tokenizer": other}  # its "universal assisted decoding"
    return lambda _: partial(ask_peer, stock, settings)


def ask_peer(
    model: PreTrainedModel, options: Mapping[str, Any], prompts: TokenIds, seed: int, max_new_tokens: int
) -> Measured:
    """Answer one prompt with transformers' `generate`."""
    ids = torch.tensor(prompts, device=model.device)
    lengths = [ids.shape[1]]

    def note_length(sequences: Tensor, scores: Any) -> Tensor:
        """A stopping criterion, asked after each forward pass of the model, which never stops."""
        lengths.append(sequences.shape[1])
        return torch.zeros_like(sequences[:, 0], dtype=torch.bool)

    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": max_new_tokens, **options}
    torch.manual_seed(seed)
    settings["stopping_criteria"] = StoppingCriteriaList([note_length])
    try:
        output, seconds = clock(lambda: model.generate(ids, **settings), model.device)
    except TypeError as error:
        raise ValueError(f"transformers' generate refuses {options}: {error}") from error
    return Measured(
        [output[0, ids.shape[1] :].tolist()], [[after - before for before, after in pairwise(lengths)]], seconds
    )


def ask_compiled(
    model: PreTrainedModel, options: Mapping[str, Any], ready: set[int], prompts: TokenIds, seed: int, limit: int
) -> Measured:
    """Like `ask_peer`, with a static cache of a power of two slots. Sizes that are not `ready` are compiled untimed."""
    size = max(SMALLEST_CACHE, 1 << (len(prompts[0]) + limit - 1).bit_length())
    options = {**options, "max_cache_len": size}
    if size not in ready:
        try:
            ask_peer(model, options, prompts, seed, min(3, limit))
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            raise ValueError(f"{COMPILED}: transformers cannot compile this model's generate: {said}") from error
        if not hasattr(model, "_compiled_call"):
            raise ValueError(f"{COMPILED}: transformers' generate does not compile this model; leave {COMPILED} out")
        ready.add(size)
    return ask_peer(model, options, prompts, seed, limit)


class OtherProgram:
    """The `Method` of an `OwnMethod`, by its class's name. After anything that the program raises, it only refuses."""

    def __init__(self, name: str, stock: PreTrainedModel, tokenizer: Tokenizer | None) -> None:
        shared = {id(tensor): tensor for tensor in chain(stock.parameters(), stock.buffers())}
        self.name, self.model, self.tokenizer = name, deepcopy(stock, shared), tokenizer
        self.own: Any = None  # an `OwnMethod` once it is loaded
        self.refusal: RefusedError | None = None

    def __call__(self, is_warm_up: bool) -> Ask:
        return self.ask

    def ask(self, prompts: TokenIds, seed: int, max_new_tokens: int) -> Measured:
        """Answer the prompts as one batch, with one text for a seed if the program draws as torch does."""
        if self.refusal is not None:
            raise self.refusal
        try:
            if self.own is None:
                self.own = find_own(self.name)()
                self.own.load(self.model, self.tokenizer)
            torch.manual_seed(seed)
            with torch.no_grad():
                found, seconds = clock(lambda: self.own.answer(prompts, max_new_tokens), self.model.device)
            if len(found) != len(prompts) or not all(passes and all(passes) for passes in found):
                raise ValueError("answer returned no list of tokens for each pass of each prompt")
            if (most := max(sum(map(len, passes)) for passes in found)) > max_new_tokens:
                raise ValueError(f"answer returned {most} tokens, where max_new_tokens was {max_new_tokens}")
            version = str(self.own.version)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            self.refusal = RefusedError(getattr(self.own, "version", None), said)
            raise self.refusal from error
        added = [[len(tokens) for tokens in passes] for passes in found]
        return Measured([[*chain(*passes)] for passes in found], added, seconds, version=version)
