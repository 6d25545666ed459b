"""What a step needs on any device: packed copies, and trees that are checked and accepted at once."""
