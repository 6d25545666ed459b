"""Making heads: texts, what the target says of them, losses, and the training loop."""
