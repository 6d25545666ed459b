"""The parts of `draftless calibrate`: measuring how often a head is right."""
