"""transformers' own tests of generation, run through `speculate` (`make test-upstream`)."""
