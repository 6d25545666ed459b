"""The parts of calibrate.py: measuring how often a head is right."""
