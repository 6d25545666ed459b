"""What a step needs on any device: packed copies, fused functions, and trees that are checked and accepted at once."""
