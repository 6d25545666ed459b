"""The old home of scripts.shared.options, for imports that have not moved yet."""

from scripts.shared.command import Parser, at_least, failing_clearly
from scripts.shared.options import ModelOptions, add_model_options, load_model_only, load_target

__all__ = [
    "ModelOptions",
    "Parser",
    "add_model_options",
    "at_least",
    "failing_clearly",
    "load_model_only",
    "load_target",
]
