"""The parts of distill.py: jobs from prompt files, their answers, and the file of answers."""
