"""Drafting with other models: smaller ones, with any tokenizer, that were trained for it or not."""
