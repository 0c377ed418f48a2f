"""When, for whom and how fast: steps, engine, sampling, text."""
