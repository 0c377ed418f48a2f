"""One file for each family of checkpoints: its key table and how its form follows from its shapes."""
