"""What several commands share: options, how a command fails, prompts, coloured text, pictures."""
