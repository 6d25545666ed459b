"""Stock models: loading, the default model, compatibility checks, hidden states, and the cost of a forward pass."""
