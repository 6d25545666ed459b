"""Draft trees, and how a path down each of them is chosen."""
