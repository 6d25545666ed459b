"""Trained heads: networks that guess the next tokens from the target's features. Each takes and returns tensors."""

from heads.hydra import HydraConfig, HydraHead
from heads.medusa import MedusaConfig, MedusaHead

HEADS = {"medusa": (MedusaHead, MedusaConfig), "hydra": (HydraHead, HydraConfig)}

__all__ = ["HEADS", "HydraConfig", "HydraHead", "MedusaConfig", "MedusaHead"]
