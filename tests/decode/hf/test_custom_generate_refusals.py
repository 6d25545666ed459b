"""Settings of `generate` that `speculate` cannot honour are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from tests.support.models import tiny
from tests.support.speculating import BATCH, MASK, NEW, generate


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama")


REFUSED: dict[str, tuple[Callable[[PreTrainedModel], dict[str, Any]], str]] = {
    "beams": (lambda model: {"num_beams": 2}, "num_beams=2"),
    "attentions": (lambda model: {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "assistant": (lambda model: {"assistant_model": model}, "assistant_model"),
    "lookup": (lambda model: {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "contrast": (lambda model: {"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    "dola": (lambda model: {"dola_layers": "high"}, "dola_layers"),
    "constraints": (lambda model: {"force_words_ids": [[5]], "num_beams": 2}, "num_beams|force_words_ids"),
    "guidance": (lambda model: {"guidance_scale": 1.5}, "guidance_scale"),
    "stateful watermark": (
        lambda model: {"watermarking_config": SynthIDTextWatermarkingConfig(5, [1, 2, 3]), "do_sample": True},
        "SynthIDTextWatermark",
    ),
    "offloaded cache": (lambda model: {"cache_implementation": "offloaded"}, "cache_implementation"),
    "gpus": (lambda model: {"synced_gpus": True}, "synced_gpus"),
    "no prompt": (lambda model: {"attention_mask": torch.zeros(1, 7).long()}, "leaves a prompt empty"),
    "nodes": (lambda model: {"nodes": 0}, "nodes is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_other_settings_are_refused(model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Stream", lambda: None)  # transformers makes one for an offloaded cache, even on a CPU
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        generate(model, **make(model))


class Silent(BaseStreamer):
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def test_a_batch_has_no_streamer(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="a streamer takes the tokens of one row"):
        generate(model, BATCH, attention_mask=MASK, streamer=Silent())


def test_rows_of_different_length_need_padding(model: PreTrainedModel) -> None:
    class Never(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.zeros(len(input_ids), dtype=torch.bool)

    bare = tiny("llama", pad_token_id=None)
    bare.generation_config.pad_token_id = None
    assert generate(bare, BATCH).shape == (3, 7 + NEW)
    with pytest.raises(ValueError, match="set pad_token_id"):
        generate(bare, BATCH, stopping_criteria=[Never()])


@pytest.mark.parametrize(
    ("kind", "message"), [("t5", "no decoder-only"), ("mamba2", "cannot branch into a tree"), ("falcon alibi", "ALiBi")]
)
def test_models_that_cannot_be_a_target_are_refused(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny(kind))


def test_training_mode_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[0].train()
    with pytest.raises(ValueError, match="training mode"):
        generate(model)
    assert model.model.layers[0].training
