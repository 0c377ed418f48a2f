"""Matmuls joined to the collective that feeds or follows them, in four interchangeable modes."""
