"""The parts of check.py --serve: a head served offline in vLLM, and what it accepts there compared with Draftless."""
