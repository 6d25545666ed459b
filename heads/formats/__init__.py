"""Readers and writers of published checkpoint formats: how each names a head's tensors and config entries."""
