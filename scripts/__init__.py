"""What is run from a shell; each file is a command of its own."""
