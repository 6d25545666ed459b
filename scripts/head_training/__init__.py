"""The parts of `draftless train`: options, plan, validation and plots."""
