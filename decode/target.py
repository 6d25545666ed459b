"""The target: the stock model whose distribution is kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from os import PathLike
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from decode.arguments import naming_arguments
from decode.costs import CONTEXTS, Costs
from decode.devices.backend import NEEDS, check_mode, find_backend
from decode.devices.cost_curve import CostCurve
from decode.models.adapters import require_peft, select_adapter
from decode.models.changes import MOVED, ModelWatch
from decode.models.compatibility import refuse_unsupported, unwrap
from decode.models.facts import ModelFacts, find_device, has_hooks
from decode.models.fingerprint import fingerprint_template, fingerprint_vocabulary, fingerprint_weights
from decode.models.loading import FIXED16, load_model
from decode.models.stock_model import copy_modules
from decode.requests.numbers import check_switches
from decode.requests.text import Tokenizer
from decode.self_test import agrees_flat, self_test
from decode.session import Session
from decode.weights.layers import PackedLayer


class Target:
    """The model whose distribution is kept, ready to verify trees.

    model: any decoder-only transformers model with sdpa, eager or flex attention. Not changed, but for `in_place`.
    accelerate: "off" uses the model as it is; "packed", "compiled", "graphs" and "auto" use an accelerated copy (see
    `decode.devices.backend`). Changes of the weights are noticed, see `read_version`.
    deterministic: the sizes of draft trees do not depend on this run's clock. Nothing is measured; True takes a fixed
    cost curve, a `CostCurve` that curve, for example `cost_curve()` of an earlier run. In a `torch.distributed` group
    the first rank's counts, and all ranks must decode the same prompts.
    in_place: accelerate the model itself, which nobody else uses. That frees its weights one by one.

    Its parts: `facts`, what the architecture allows; `backend`, what the device can do; `costs`, what passes cost. What
    follows from these is decided here, once. needs_masks: prompts need masks, too. sees_texts_whole: nodes may see long
    texts without a mask. passes_flat: a pass takes the tokens of all rows as one row, without padding, and as long as
    these take. has_graphs: steps are graphs.

    Raises ValueError for a model that cannot verify a tree, or that `accelerate` cannot compile or make graphs of.
    """

    output_tokens: Tensor | None = None  # of a draft model whose output layer has these tokens alone
    adapter: str | None = None  # its name, of a target that `adapt` returned
    fault: str | None = None  # why that adapter cannot be used since the model has changed
    _base: Target  # that it was returned by
    _builds = 0  # how often modules were accelerated
    _made_from = 0, 0  # of `_base`: its builds, and how often its model has moved

    @naming_arguments("Target")
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None = None,
        *,
        accelerate: str = "off",
        deterministic: bool | CostCurve = False,
        in_place: bool = False,
    ) -> None:
        check_mode(accelerate)
        check_switches(in_place=in_place)
        model = unwrap(model)
        refuse_unsupported(model)
        with _without_autocast(model):
            own, mode = (model, accelerate) if in_place else _copy_for(model, accelerate)
            self._set_up(own, tokenizer, accelerate, mode, Costs(deterministic))
        self.watch, self._shares_all = ModelWatch(model), own is model
        self._adapted: WeakValueDictionary[str, Target] = WeakValueDictionary()  # what `adapt` has returned

    @classmethod
    @naming_arguments("Target.load")
    def load(
        cls,
        name: str | PathLike[str] | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        device_map: str | None = None,
        accelerate: str = "auto",
        deterministic: bool | CostCurve = False,
    ) -> Self:
        """Load a target from a local folder, a hub id or a GGUF file; without a name, the default model.

        Arguments and errors are those of `decode.models.loading.load_model`, and of this class. A folder may have a
        peft adapter, which is merged. One more dtype is "fixed16", on a CPU: float32, but layers with weights in blocks
        round their inputs to 16 bits. That is faster, and once in some thousand tokens another one is the most likely.
        """
        check_mode(accelerate)
        model, tokenizer = load_model(
            name, dtype=dtype, device=device, device_map=device_map, in_blocks=accelerate != "off"
        )
        target = cls(model, tokenizer, accelerate=accelerate, deterministic=deterministic, in_place=True)
        if dtype == FIXED16:
            target.backend.round_inputs(target.model)
        return target

    def _set_up(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer | None,
        accelerate: str,
        mode: str,
        costs: Costs,
    ) -> None:
        """Accelerate the model in place, by a mode, and decide all that follows from it and its device."""
        self.needs_masks = self.sees_texts_whole = self.passes_flat = self.has_graphs = False
        self.model, self.tokenizer, self.accelerate, self._mode = model, tokenizer, accelerate, mode
        self._builds += 1
        self.idle_steps: list[Any] = []  # of a session that has ended, one at most; see `Session`
        if self.adapter is None:  # packed layers have no parameters
            self._fingerprint = None if mode == "off" else fingerprint_weights(model)
        self.config = model.config.get_text_config(decoder=True)
        self.facts, self.dtype, self.device = ModelFacts.of(model), model.dtype, find_device(model)
        self.vocabulary, self.context = self.facts.vocabulary, self.facts.context
        self.is_recurrent = self.facts.is_recurrent
        self.backend, self.costs = find_backend(self.device), costs
        self.backend.accelerate(model, mode)
        self.is_packed = any(isinstance(module, PackedLayer) for module in model.modules())
        self.compiled = self.backend.compile(self, mode)
        self.needs_masks = self.backend.needs_masks(model)
        is_own = self.backend.attention is not None and model.config._attn_implementation == self.backend.attention
        size = self.facts.head_size
        self.sees_texts_whole = is_own and size is not None and self.backend.sees_texts_whole(self.dtype, size)
        self_test(self)
        if self.backend.can_pass_flat(model) and not self.is_recurrent:
            self.passes_flat = True  # while it is tried
            self.passes_flat = agrees_flat(self)
        if mode in ("auto", "graphs") and "graphs" not in self.backend.lacks and not has_hooks(model):
            fault = self.backend.find_graph_fault(self)
            if fault is not None and mode == "graphs":
                raise ValueError(f"{self.config.model_type} cannot have CUDA graphs ({fault}); choose auto or packed")
            self.has_graphs = fault is None

    def read_version(self, deep: bool = False) -> int:
        """A number that rises when the model's weights or adapters have changed. What was computed before is void then.

        Before each step it compares which tensors there are, where they lie, and torch's version of each. Writing
        through `.data` changes none of these. deep: compare some elements of each tensor as well, which takes
        milliseconds and sees most such writing. It is done before prompts are read.

        Raises ValueError, with the call to make, if the model is in training mode, if it has another form, or if this
        target has copies of weights that have changed.
        """
        if self.adapter is not None:
            version = self._base.read_version(deep)
            self._follow_base()
            return version
        version = self.watch.look(deep)
        if self.watch.changes and self._has_old_copies:
            raise ValueError(
                "the model's weights have changed, and this target has copies of earlier ones; call "
                "target.weights_changed() before the next step"
            )
        return version

    @property
    def _has_old_copies(self) -> bool:
        """Whether it has copies of earlier weights, or graphs that read earlier tensors."""
        changes = self.watch.changes
        holds_places = self.has_graphs or not self._shares_all
        return bool(changes) and (self.is_packed or (MOVED in changes and holds_places))

    @property
    def given_model(self) -> PreTrainedModel | None:
        """The model that it was made from; None if that is gone."""
        return self.watch.model

    def weights_changed(self) -> None:
        """Make anew what was computed from the model's weights. Call it after changing them, while no step runs.

        Packed copies of tensors that were written in place, by an optimizer for example, are written in place too. If
        there are other tensors, modules or adapters, all copies are made anew. Requests that run end with "error",
        but for those with `follow_weights`, and texts that engines have kept are dropped.

        Raises ValueError if the model is gone, in training mode, or has another form, and for other tensors of a model
        that was packed before, whose copies are the only ones.
        """
        if self.adapter is not None:
            self._base.weights_changed()
            return
        with self.watch.lock:
            self.watch.look(deep=True)
            changes, model = self.watch.changes, self.given_model
            if model is None:
                raise ValueError(
                    "the model of this target is gone; make a new one of another: Target(model, tokenizer)"
                )
            has_moved = MOVED in changes
            if has_moved and self.is_packed and self._shares_all:
                raise ValueError("a packed model has other tensors or modules than before; load it again: Target.load")
            if changes:
                self._fingerprint = None
            if self._has_old_copies:
                changes.add(MOVED)  # if this ends early, all is made anew the next time
                packed = (each for each in self.model.modules() if isinstance(each, PackedLayer))
                if has_moved or not all(each.repack() for each in packed):
                    with _without_autocast(model):
                        own, mode = _copy_for(model, self.accelerate)
                        self._set_up(own, self.tokenizer, self.accelerate, mode, self.costs)
                    self._shares_all = own is model
            changes.clear()

    def adapt(self, name: str) -> Target:
        """The target with one adapter of its peft model, and no other, whatever the model itself has active.

        It has modules of its own, which share all tensors with this target's, so it needs little memory. It follows the
        model's weights as this target does. Heads and stores for the model without the adapter draft worse for it. Call
        it while no step of this target runs.

        Raises ValueError for an adapter that the model does not have, and if one is merged into the weights.
        """
        if self.adapter is not None:
            return self._base.adapt(name)
        require_peft()
        with self.watch.lock:
            adapted = self._adapted.get(name)
            if adapted is None:
                adapted = copy(self)
                adapted.adapter, adapted._base, adapted._shares_all = name, self, False
            adapted.read_version()
            self._adapted[name] = adapted
            return adapted

    def _follow_base(self) -> None:
        """Copy the modules of the target that it was returned by, if they are others than before.

        Raises ValueError if the adapter cannot be used, now and until the model changes again.
        """
        base = self._base
        with self.watch.lock:
            if self._made_from != (made_from := (base._builds, self.watch.moves)):
                try:
                    own = select_adapter(base.model, str(self.adapter))
                    with _without_autocast(own):
                        self._set_up(own, base.tokenizer, base.accelerate, base._mode, Costs(base.costs.fixed))
                    self.fault = None
                except ValueError as error:
                    self.fault = str(error)
                self._made_from = made_from
        if self.fault is not None:
            raise ValueError(self.fault)

    def run(self, cache: Cache, counts: Tensor | None = None, **inputs: Any) -> ModelOutput:
        """The model's forward pass, which reads and extends a KV cache.

        counts [B]: how many inputs each row has, in a flat pass.
        """
        with self.backend.running() if counts is None else self.backend.passing_flat(counts):
            return self.model(**inputs, **{self.facts.cache_name: cache}, use_cache=True)

    def open(self, batch_size: int, layers: Sequence[int] = ()) -> Session:
        """An empty KV cache for `batch_size` rows. layers: the hidden states that a verdict carries as features."""
        steps = self.backend.open_steps(self, batch_size, layers) if self.has_graphs else None
        return Session(self, batch_size, layers, steps=steps)

    def warm_up(self, batch_size: int = 1) -> None:
        """Measure the cost curves of batches of up to `batch_size` rows, which would otherwise delay an answer.

        Nothing is measured twice: curves are kept in the user's cache. Those that steps have contradicted are measured
        again.
        """
        self.costs.warm_up(self, batch_size)
        self.backend.release_threads()

    def cost_curve(self, batch_size: int = 1, context: int = CONTEXTS[0]) -> CostCurve:
        """The cost of verifying N nodes relative to one node, after `context` committed tokens.

        It is measured now unless `warm_up` has done it or the user's cache has it. With `deterministic` nothing is
        measured, and the context does not count. context: if `passes_flat`, the average of the rows, else the longest.
        """
        curve = self.costs.find(self, batch_size, context)
        return curve.padded if self.has_graphs else curve

    def cost_after(self, texts: Sequence[Sequence[int]]) -> CostCurve:
        """The cost curve of a batch of these texts, corrected by what steps took. A new object if that changes."""
        curve = self._measured_after(texts)
        return curve if self.deterministic else self.costs.steps.correct(curve, len(texts))

    def learn_cost(self, texts: Sequence[Sequence[int]], nodes: float, seconds: float) -> None:
        """Take in how long a step over `nodes` nodes of each row took, drafting left out."""
        if not self.deterministic:
            self.costs.steps.learn(self._measured_after(texts), len(texts), nodes, seconds)

    def _measured_after(self, texts: Sequence[Sequence[int]]) -> CostCurve:
        lengths = [*map(len, texts)]
        return self.cost_curve(len(texts), sum(lengths) // len(lengths) if self.passes_flat else max(lengths))

    @property
    def deterministic(self) -> bool:
        """Whether nothing is measured."""
        return bool(self.costs.fixed)

    @property
    def weights_fingerprint(self) -> str | None:
        """See `decode.models.fingerprint`. None for a model that was packed before it became a target, and for one of
        several adapters.
        """
        if self.adapter is not None:
            return None
        model = self.model if self._shares_all else self.given_model
        if self._fingerprint is None and model is not None and not (self._shares_all and self.is_packed):
            self._fingerprint = fingerprint_weights(model)
        return self._fingerprint

    @property
    def fingerprints(self) -> dict[str, str | None]:
        """Of the weights, the vocabulary and the chat template, as far as they are known, by name."""
        found: dict[str, str | None] = {} if (weights := self.weights_fingerprint) is None else {"weights": weights}
        if self.tokenizer is None:
            return found
        own = {"vocabulary": fingerprint_vocabulary(self.tokenizer), "template": fingerprint_template(self.tokenizer)}
        return found | own

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer, from the model's generation config."""
        config = self.model.generation_config
        ids = config.eos_token_id if config is not None else None
        listed = [ids] if isinstance(ids, int) else ids or ()
        return frozenset(each for each in listed if 0 <= each < self.vocabulary)  # a model's -1 means none

    @property
    def output_matrix(self) -> Tensor:
        """The output layer's matrix [V, H]. Raises ValueError if the model has no dense one."""
        output, embeddings = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        if hasattr(output, "dense_weight") and not (self.config.tie_word_embeddings and hasattr(embeddings, "weight")):
            return output.dense_weight()
        matrix = getattr(embeddings if self.config.tie_word_embeddings else output, "weight", None)
        if not isinstance(matrix, Tensor) or matrix.is_meta:
            raise ValueError(f"{type(self.model).__name__} has no dense output matrix that a head could share")
        return matrix.detach()

    @property
    def output_bias(self) -> Tensor | None:
        """The output layer's bias [V]; None in most models."""
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    @property
    def embedding_matrix(self) -> Tensor:
        """The matrix [V, H] that embeddings are looked up in."""
        embeddings: Any = self.model.get_input_embeddings()
        matrix: Tensor = embeddings.layer.dense_weight() if hasattr(embeddings, "layer") else embeddings.weight.detach()
        return matrix

    @property
    def embedding_scale(self) -> float:
        """What the embedding layer multiplies rows of `embedding_matrix` with, as in Gemma; 1 in most models."""
        embeddings = self.model.get_input_embeddings()
        return float(getattr(getattr(embeddings, "module", embeddings), "embed_scale", 1.0))


def _without_autocast(model: PreTrainedModel) -> AbstractContextManager[object]:
    """The model is compared with its copy and with itself, which is allowed the rounding of its own dtype."""
    device = model.device.type
    can_cast = torch.amp.autocast_mode.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if can_cast else nullcontext()


def _copy_for(model: PreTrainedModel, mode: str) -> tuple[PreTrainedModel, str]:
    """What may be accelerated, and the mode: modules are copied, tensors are shared, the given model stays as it is.

    The model itself for "off", if it is packed already, and if accelerate's hooks spread it over devices. Raises
    ValueError if such a model is to be compiled or to have graphs.
    """
    if mode == "off":
        return model, mode
    if has_hooks(model) or any(isinstance(module, PackedLayer) for module in model.modules()):
        if mode in NEEDS:
            raise ValueError(f"a model that is packed already or spread over devices cannot have accelerate={mode!r}")
        return model, "off"
    return copy_modules(model), mode


def check_target(target: Any, other: Any = None, order: str = "") -> None:
    """Raise TypeError, with the right call, for anything but a target.

    other, order: the argument that a target may have changed places with, and the call that takes it as "{}".
    """
    if isinstance(target, Target):
        return
    call = "Target(model, tokenizer)"
    if isinstance(other, Target):
        call = order.format(repr(str(target)) if isinstance(target, str | PathLike) else "prompts")
    elif isinstance(target, str | PathLike):
        call = f"Target.load({str(target)!r})"
    elif isinstance(target, type):
        call = "Target.load(name) or Target(model, tokenizer)"
    kind = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
    raise TypeError(f"the target is {kind}; give {call}")
