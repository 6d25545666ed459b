"""The parts of check.py: rules of vLLM and SGLang for a head's folder, serving commands, and a decode trial."""
