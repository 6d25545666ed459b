"""Trained heads: networks that guess the next tokens from the target's features. Each takes and returns tensors."""

from heads.cache import LayerCache
from heads.decoder_layer import LayerConfig
from heads.folder import load_head, save_head
from heads.hydra import HydraConfig, HydraHead
from heads.medusa import MedusaConfig, MedusaHead

HEADS = {"medusa": (MedusaHead, MedusaConfig), "hydra": (HydraHead, HydraConfig)}

__all__ = [
    "HEADS",
    "HydraConfig",
    "HydraHead",
    "LayerCache",
    "LayerConfig",
    "MedusaConfig",
    "MedusaHead",
    "load_head",
    "save_head",
]
