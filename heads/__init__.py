"""Heads: networks that draft tokens from the target's features. They take and return plain tensors."""

from pathlib import Path

from heads.checkpoint import load_head, save_head
from heads.dflash import DFlashConfig, DFlashHead
from heads.eagle import Eagle3Config, Eagle3Head, EagleConfig, EagleHead, PEagleConfig, PEagleHead, choose_features
from heads.flashmap import FlashMapConfig, FlashMapHead
from heads.jump import JumpConfig, JumpHead
from heads.kinds import KINDS, Kind
from heads.layer_cache import LayerCache
from heads.layers import LayerConfig
from heads.medusa import HydraConfig, HydraHead, MedusaConfig, MedusaHead, MultiTokenConfig, MultiTokenHead
from heads.mtp import MtpConfig, MtpHead

PRETRAINED = Path(__file__).parent / "pretrained" / "smollm2-135m-instruct"  # a folder per kind, for the default model

__all__ = [
    "KINDS",
    "PRETRAINED",
    "DFlashConfig",
    "DFlashHead",
    "Eagle3Config",
    "Eagle3Head",
    "EagleConfig",
    "EagleHead",
    "FlashMapConfig",
    "FlashMapHead",
    "HydraConfig",
    "HydraHead",
    "JumpConfig",
    "JumpHead",
    "Kind",
    "LayerCache",
    "LayerConfig",
    "MedusaConfig",
    "MedusaHead",
    "MtpConfig",
    "MtpHead",
    "MultiTokenConfig",
    "MultiTokenHead",
    "PEagleConfig",
    "PEagleHead",
    "choose_features",
    "load_head",
    "save_head",
]
