"""Measuring: what a device can do, what a step takes there, and what differs between settings."""
