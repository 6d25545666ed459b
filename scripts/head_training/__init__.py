"""The parts of `draftless train`: options, setup, plan, validation and plots."""
