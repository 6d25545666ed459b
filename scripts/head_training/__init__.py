"""The parts of train.py: options, setup, plan, validation and plots."""
