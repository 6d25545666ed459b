"""Readers and writers of published checkpoint formats: how each names a head's tensors and config entries."""

# `read_medusa`, `read_hydra`, `read_eagle` and `read_eagle3` take the shapes of a file's tensors, its config and, for
# files without them, the target's vocabulary size and number of layers. They return None if the file has no such head,
# and raise ValueError if a size is unknown or the file contradicts itself.
