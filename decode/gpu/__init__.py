"""Makes a decoding step fast on a GPU: packed copies, and rules that neither wait nor loop over levels."""
