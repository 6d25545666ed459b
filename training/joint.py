"""Medusa-2: a head and adapters of its target are trained together, so that the target becomes easier to draft for.

Cai et al., "Medusa" (2024), section 2.2.2. Self-distillation (section 2.3.2) keeps the adapted target close to the
original, which is the teacher. Training starts from a trained head: a new one would only disturb the target.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save
from torch import nn
from transformers import PreTrainedModel

from decode import Target
from decode.models.adapters import ADAPTER, ADAPTER_WEIGHTS, merge_adapters, name_base, require_peft, wrap
from decode.models.stock_model import find_decoder
from heads.atomic_write import replace_files
from training.losses import divergence
from training.objectives import Loss, Objective
from training.teacher import Batch, run_target

JOINT_KINDS = "medusa", "hydra"  # their features are the target's last states alone
HEAD_WEIGHT = 0.2  # of the head's loss, as in the authors' recipe
RATE_SHARE = 1 / 4  # of the head's learning rate, for the adapters (section 2.2.2)
RANK, ALPHA = 32, 16.0  # of the adapters, as in the authors' recipe


class Adapters:
    """LoRA adapters in all linear layers of a target's decoder. From now on the target has them.

    target: in float32 and with `accelerate="off"`. name: what it was loaded by. The output layer has no adapter: heads
    may share it.

    Raises ValueError without the package peft, and for a model without plain linear layers.
    """

    def __init__(self, target: Target, name: str | None, rank: int = RANK) -> None:
        require_peft()
        from peft import LoraConfig

        inside = {*find_decoder(target.model)[0].modules()}
        found = [path for path, part in target.model.named_modules() if type(part) is nn.Linear and part in inside]
        if not found:
            raise ValueError(
                f"{type(target.model).__name__} has no linear layers to adapt; quantized ones do not count"
            )
        self.target = target
        self.config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=found, task_type="CAUSAL_LM")
        self.model: Any = wrap(target.model, self.config).eval()
        self.config.base_model_name_or_path, self.config.inference_mode = name_base(name), True  # as they are saved
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]

    def off(self) -> AbstractContextManager[None]:
        """A context in which the target is the original."""
        context: AbstractContextManager[None] = self.model.disable_adapter()
        return context

    def merge(self) -> PreTrainedModel:
        """The adapted model as it is loaded from the folder of `save`. It shares the tensors that have no adapter."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [layer for layer in self.model.modules() if isinstance(layer, BaseTunerLayer)]
        own = {id(weight) for layer in layers for weight in layer.parameters()}
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return merge_adapters(deepcopy(self.model, {id(each): each for each in tensors if id(each) not in own}))

    def save(self, folder: Path) -> None:
        """Write a peft folder with the adapters and the tokenizer. Files are replaced one by one, the config last."""
        from peft import get_peft_model_state_dict

        states = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        weights = save({name: weight.cpu().contiguous() for name, weight in states.items()}, {"format": "pt"})

        def write(aside: Path) -> None:
            (aside / ADAPTER_WEIGHTS).write_bytes(weights)
            self.config.save_pretrained(str(aside))
            if self.target.tokenizer is not None:
                self.target.tokenizer.save_pretrained(aside)

        replace_files(folder, write, last=ADAPTER)


class JointObjective(nn.Module):
    """KL(original target || adapted target) on the answers, plus `HEAD_WEIGHT` times the head's loss on the features of
    the adapted target.

    Labels and probabilities of a batch are the original target's; its features are not used. The target is no part of
    this module: it stays in evaluation mode.
    """

    rate_shares: ClassVar[dict[str, float]] = {"adapters": RATE_SHARE}

    def __init__(self, adapters: Adapters, objective: Objective) -> None:
        super().__init__()
        self.target, self.objective = adapters.target, objective
        self.adapters = nn.ParameterList(adapters.weights)

    def forward(self, batch: Batch) -> Loss:
        answers = batch.answers
        features, logits = run_target(self.target, self.objective.head.features, batch.tokens, answers)
        loss: Loss = self.objective(batch._replace(features=features))
        drift = divergence(logits, batch.labels[answers], batch.probabilities[answers])
        return replace(loss, total=drift + HEAD_WEIGHT * loss.total)
