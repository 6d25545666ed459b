"""GGUF files: their header, tokenizer and config, and their models in blocks."""
