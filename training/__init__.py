"""Training heads: data, targets computed by the model, losses, and the training loop. Rollouts for other trainers."""
