"""The parts of bench.py: questions, conversations, methods, rows, files and the picture."""
