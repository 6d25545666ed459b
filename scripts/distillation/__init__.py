"""The parts of `draftless distill`: jobs from prompt files, their answers, and the file of answers."""
