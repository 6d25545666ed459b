"""The parts of `draftless bench`: methods, measurement on questions, passes, rows and tables, files, the picture."""
