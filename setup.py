"""Packaging: the four packages by name, the one command line, and what each use needs.

Import path equals folder, so that an editable install and a wheel agree. Tests, training and benchmarks
are not shipped; the embedded checkpoint is, as data of the package `checkpoints`.
"""

from pathlib import Path

from setuptools import setup

setup(
    name="palm-inference",
    version="0.1.0",
    description="Inference engine in JAX for PaLM-style language models, with layout as the product",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=[
        "layers",
        "layers.collectives",
        "checkpoints",
        "checkpoints.readers",
        "checkpoints.readers.huggingface",
        "inference_engine",
        "inference_engine.checking",
        "inference_engine.cli",
        "inference_engine.profiling",
        "configs",
    ],
    py_modules=["run_serving"],
    package_data={"checkpoints": ["default/**"]},
    entry_points={"console_scripts": ["run-serving = run_serving:main"]},
    install_requires=[
        "absl-py>=2.1",
        "flax>=0.12",
        "jax>=0.10.2,<0.12",
        "jaxlib>=0.10.2,<0.12",
        "jaxtyping>=0.3",
        "ml_dtypes>=0.5",
        "numpy>=2.0",
        "orbax-checkpoint>=0.12",
        "rich>=13",  # flax requires it already, so a plain terminal fallback is all that it costs
        "sentencepiece>=0.2.1",
        "tensorstore>=0.1.70",
    ],
    extras_require={
        # Files of other projects: GGUF, chat templates, safetensors, tokenizer.json.
        "hf": ["gguf>=0.17", "jinja2>=3.1", "safetensors>=0.5", "tokenizers>=0.21"],
        "test": [
            "beartype>=0.20",
            "hypothesis>=6.100",
            "pytest>=9",
            "pytest-xdist>=3.8",
            "scipy>=1.14",
            "palm-inference[hf]",
        ],
        "dev": ["mypy>=2.4,<3", "pre-commit>=4", "ruff>=0.17.6,<0.18"],
        # The TPU compiler runs without a TPU; later wheels cannot print every program.
        "tpu-compiler": ["libtpu==0.0.42.1; platform_system == 'Linux' and platform_machine == 'x86_64'"],
        "plots": ["matplotlib>=3.9"],
        # The independent implementations that the stored reference logits come from, and what the PaLM
        # packages import; these themselves the tests fetch, each release alone (tests/palm_originals.py).
        "oracles": [
            "accelerate>=1",
            "beartype>=0.20",
            "einops>=0.8",
            "equinox>=0.13",
            "torch==2.13.0",
            "transformers>=5",
            "palm-inference[hf]",
        ],
    },
)
