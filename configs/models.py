"""Models by name: each a function that returns its `HParams`.

PaLM's sizes are from Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), Table 1;
the vocabulary of 256,000 is padded to 256,128 = 2001 · 128.
"""

from layers.hparams import HParams

PALM_VOCAB = 256_128


def palm_8b() -> HParams:
    """PaLM 8B: 8.63 billion parameters."""
    return HParams(layers=32, embed=4096, ff=16384, heads=16, kv_heads=1, qkv=256, vocab=PALM_VOCAB)


def palm_62b() -> HParams:
    """PaLM 62B: 62.50 billion parameters."""
    return HParams(layers=64, embed=8192, ff=32768, heads=32, kv_heads=1, qkv=256, vocab=PALM_VOCAB)


def palm_540b() -> HParams:
    """PaLM 540B: 540.36 billion parameters."""
    return HParams(layers=118, embed=18432, ff=73728, heads=48, kv_heads=1, qkv=256, vocab=PALM_VOCAB)


def palm_shakespeare() -> HParams:
    """The default checkpoint's form: 5.5 million parameters; its sizes divide over axes of 2, 3 and 4."""
    return HParams(layers=6, embed=240, ff=960, heads=8, kv_heads=1, qkv=32, vocab=2048)


def palm_100m() -> HParams:
    """A synthetic size for benchmarks: 102 million parameters, too large for a CPU's caches."""
    return HParams(layers=12, embed=768, ff=3072, heads=12, kv_heads=1, qkv=64, vocab=8192)


MODELS = {
    function.__name__: function
    for function in (palm_8b, palm_62b, palm_540b, palm_shakespeare, palm_100m)
}  # fmt: skip
