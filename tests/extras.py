"""Marks of tests that need an optional package: without it they are skipped, with the package's name.

Worked example: `pytestmark = NEEDS_SAFETENSORS` at the top of a test module.
"""

import importlib.util

import pytest


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    """A mark that skips where a package is not installed."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs the package {package} (extra {extra})")


NEEDS_SAFETENSORS = needs("safetensors", "hf")
NEEDS_GGUF = needs("gguf", "hf")
NEEDS_TOKENIZERS = needs("tokenizers", "hf")
NEEDS_JINJA = needs("jinja2", "hf")
