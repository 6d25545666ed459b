"""Requests: their prompts as tokens, their settings, and their answers as text."""
