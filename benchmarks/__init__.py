"""Measurements of speed, as ratios to what the machine can do, taken in the same run."""
