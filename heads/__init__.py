"""Trained heads: networks that guess the next tokens from the target's features. Each takes and returns tensors."""

from pathlib import Path

from heads.cache import LayerCache
from heads.decoder_layer import LayerConfig
from heads.folder import load_head, save_head
from heads.hydra import HydraConfig, HydraHead
from heads.medusa import MedusaConfig, MedusaHead

PRETRAINED = Path(__file__).parent / "pretrained" / "smollm2-135m-instruct"  # a folder a kind, for the default model
HEADS = {"medusa": (MedusaHead, MedusaConfig), "hydra": (HydraHead, HydraConfig)}

__all__ = [
    "HEADS",
    "PRETRAINED",
    "HydraConfig",
    "HydraHead",
    "LayerCache",
    "LayerConfig",
    "MedusaConfig",
    "MedusaHead",
    "load_head",
    "save_head",
]
