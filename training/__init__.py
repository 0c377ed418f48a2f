"""How the embedded default checkpoint is made: its text, its tokenizer, its training run."""
