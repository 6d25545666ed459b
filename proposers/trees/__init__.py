"""Draft trees of heads, searched level by level."""
