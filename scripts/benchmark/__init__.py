"""The parts of `draftless bench`: methods, questions, measuring, rows, tables, files and the picture."""
