"""Draft trees of heads: searched level by level, of fixed shape, or of sampled tokens."""
