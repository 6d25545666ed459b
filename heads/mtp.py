"""Multi-token-prediction modules (MTP): one more decoder layer of the target's own kind, in the target's checkpoint.

Sources: DeepSeek-AI, "DeepSeek-V3" (2024, arXiv 2412.19437), section 2.2; drafting several tokens with one module is
"FastMTP" (2025, arXiv 2509.18362). Shapes: B rows, N tokens, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from heads.eagle import copy_last
from heads.layer_cache import Attend, attend
from heads.vocabulary import HeadConfig, Output, VocabularyHead

ATTENTION = "draftless_head"  # transformers' name for attention that `Attend` computes
UNKNOWN = "s_aux", "softcap", "position_bias"  # of an attention layer, which `Attend` cannot compute
SPARSE = "index_topk", "indexer_budget"  # of configs whose layers choose what they attend to


@dataclass(frozen=True)
class MtpConfig(HeadConfig):
    """Sizes of an MTP module.

    block: the config of a transformers model with this one layer, see `describe_block`. normed_feedback: feed normed
    states back, as Qwen and MiMo do and DeepSeek and GLM do not. states_first: MiMo's order of the two inputs.
    embedding, output: its own token embeddings and output matrix instead of the target's.
    """

    block: Mapping[str, Any] = field(default_factory=dict)
    normed_feedback: bool = False
    states_first: bool = False
    embedding: bool = False
    output: Output = "target"


class MtpHead(VocabularyHead):
    """Predicts a state from the target's last one and the token after it, as `EagleHead` does.

    Its decoder layer is transformers' own class, so it has the experts, norms and gates of the target's layers. The
    other parameters are named as DeepSeek-V3's. A new head's layer reads its input feature.
    """

    kind = "mtp"
    reads_all_features = True
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config, config.output)
        size = config.hidden_size
        model = make_block(config.block)
        self.in_float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        self.block: Any = model.get_decoder()
        self.block.set_input_embeddings(nn.Identity())
        self.norm, self.block.norm = self.block.norm, nn.Identity()
        self.enorm, self.hnorm = copy.deepcopy(self.norm), copy.deepcopy(self.norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.has_run = False
        copy_last(self.eh_proj)

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, attend: Attend = attend) -> Tensor:
        """States [B, N, H], as in `EagleHead.forward`."""
        parts = [self.enorm(embedded), self.hnorm(features)]
        states = self.eh_proj(torch.cat(parts[::-1] if self.config.states_first else parts, dim=-1))
        output = self.block(inputs_embeds=states, position_ids=positions, use_cache=False, attend=attend)
        states = output.last_hidden_state
        return self.norm(states) if self.config.normed_feedback else states

    def normalise(self, states: Tensor) -> Tensor:
        return states if self.config.normed_feedback else self.norm(states)

    @torch.no_grad()
    def check_target(self, hidden_size: int, vocab_size: int, layers: int) -> None:
        """Raise ValueError if it was trained for a target of other sizes, or if its layer cannot be run here."""
        super().check_target(hidden_size, vocab_size, layers)
        if self.has_run:
            return
        weight = self.eh_proj.weight  # without values once it is packed
        states = torch.zeros(1, 2, hidden_size, dtype=weight.dtype, device=weight.device)
        try:
            self(states, states, torch.arange(2, device=states.device)[None])
        except Exception as error:  # anything from the layer's code
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"an MTP module of {self.config.block['model_type']} cannot be run here: {reason}"
            ) from error
        self.has_run = True


def describe_block(config: PreTrainedConfig, sparse: bool = True) -> dict[str, Any]:
    """The config of a model of one decoder layer as the target's that attend to everything.

    sparse: whether it has experts, if the target has. The model's vocabulary is one token: its embeddings and output
    layer are not used.
    """
    settings = config.to_diff_dict()
    types = settings.get("layer_types")
    settings |= {
        **{"num_hidden_layers": 1, "vocab_size": 1, "tie_word_embeddings": False},
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **({"layer_types": ["full_attention"]} if types else {}),
    }
    for name, value in {
        **{"first_k_dense_replace": 0 if sparse else 1, "mlp_only_layers": [] if sparse else [0]},
        **{"decoder_sparse_step": 1, "mlp_layer_types": ["sparse" if sparse else "dense"]},
    }.items():
        if settings.get(name) is not None:
            settings[name] = value
    for name in ("dtype", "quantization_config", "auto_map", "_name_or_path", "architectures", "transformers_version"):
        settings.pop(name, None)
    return settings


def make_block(settings: Mapping[str, Any]) -> PreTrainedModel:
    """A model of one decoder layer, with random weights on the default device.

    Raises ValueError if transformers does not know it, or if it is no model whose layers lie between embeddings and a
    norm.
    """
    name = settings["model_type"]
    if any(settings.get(setting) for setting in SPARSE):
        raise ValueError(f"an MTP module of {name} is not supported: it has sparse attention")
    try:
        config = AutoConfig.for_model(**settings)
        # Kernels for experts that are faster for many tokens do not support float64.
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, experts_implementation="eager")
    except Exception as error:  # each config and model class has checks of its own
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"an MTP module of {name} is not supported: transformers makes no layer of it ({reason})"
        ) from error
    block: Any = model.get_decoder()
    if not all(hasattr(block, part) for part in ("layers", "norm", "rotary_emb")):
        raise ValueError(f"an MTP module of {name} is not supported: it needs layers, norm and rotary_emb")
    with torch.device("cpu"):  # its frequencies are in no file
        block.rotary_emb = type(block.rotary_emb)(config=block.config)
    return model


def compute_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, attend: Attend | None = None, **settings: Any
) -> tuple[Tensor, None]:
    """An attention function for transformers' layers: `attend`, whose scale is that of the head size."""
    if attend is None:
        raise ValueError("its layer does not hand arguments on to its attention")
    if unknown := [name for name in UNKNOWN if settings.get(name) is not None]:
        raise ValueError(f"its attention has {unknown[0]}")
    size = query.shape[3]
    scale = settings.get("scaling") or size**-0.5
    return attend(query * (scale * size**0.5), key, value).transpose(1, 2), None


AttentionInterface.register(ATTENTION, compute_attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **settings: None)  # `Attend` hides what is not to be seen
