"""Makes a decoding step fast on a GPU: steps of fixed shape, and CUDA graphs."""
