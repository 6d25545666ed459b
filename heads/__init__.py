"""Trained heads: networks that guess the next tokens from the target's features. Each takes and returns tensors."""

from pathlib import Path

from heads.checkpoint import load_head, save_head
from heads.decoder_layer import LayerConfig
from heads.eagle import EagleConfig, EagleHead
from heads.eagle3 import Eagle3Config, Eagle3Head, choose_features
from heads.hydra import HydraConfig, HydraHead
from heads.layer_cache import LayerCache
from heads.medusa import MedusaConfig, MedusaHead
from heads.rope import RopeScaling

PRETRAINED = Path(__file__).parent / "pretrained" / "smollm2-135m-instruct"  # a folder a kind, for the default model
HEADS = {
    "medusa": (MedusaHead, MedusaConfig),
    "hydra": (HydraHead, HydraConfig),
    "eagle": (EagleHead, EagleConfig),
    "eagle3": (Eagle3Head, Eagle3Config),
}

__all__ = [
    "HEADS",
    "PRETRAINED",
    "Eagle3Config",
    "Eagle3Head",
    "EagleConfig",
    "EagleHead",
    "HydraConfig",
    "HydraHead",
    "LayerCache",
    "LayerConfig",
    "MedusaConfig",
    "MedusaHead",
    "RopeScaling",
    "choose_features",
    "load_head",
    "save_head",
]
