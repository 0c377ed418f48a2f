"""Prompts by model, and how they are sampled where no flag says otherwise."""

from inference_engine.sampling_params import SamplingParams


def shakespeare_prompt() -> str:
    """A speaker's line as the default checkpoint's text writes it: the speech is the model's."""
    return "PROTEUS.\n"


def free_text() -> SamplingParams:
    """Sampling that reads well: a temperature under 1, a fixed seed."""
    return SamplingParams(temperature=0.6, seed=0, max_new_tokens=128)
