"""The parts of `draftless serve`."""
