"""Engine sizes by use: each a function that returns its `EngineConfig`."""

from inference_engine.config import EngineConfig


def interactive() -> EngineConfig:
    """A few texts at a time on whatever machine there is: 4 slots of 512 positions."""
    return EngineConfig(slots=4, max_context=512, prefill_chunk=64)


ENGINES = {function.__name__: function for function in (interactive,)}
