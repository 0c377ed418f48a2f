"""Bytes to params and back: one neutral state, one reader per source."""
