"""Weights in the forms that files store them in."""
