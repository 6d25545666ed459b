"""Drafting on a GPU: in steps of fixed shape, which are CUDA graphs if the target's are."""
