"""Reads and writes the checkpoint formats that others publish."""
