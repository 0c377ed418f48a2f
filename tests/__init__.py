"""Tests; a package, so that test modules share helpers as `tests.name`."""
