"""The parts of `draftless check`: silent faults of a head's folder, drafting with it here, and serving it in vLLM."""
