"""The command line: flags, help, errors, prompts in, text or JSON out."""
