"""Grammars: what answers must look like, and which tokens that leaves after each draft token."""
