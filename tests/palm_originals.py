"""The original PaLM packages, run on tiny models of power: the other side of their readers.

Idea: a folder of `tests/oracles/palm` holds a file as the package's users save it (`torch.save` of a state
dict, `equinox.tree_serialise_leaves`) and what the package itself computes with it in float32. So the tests
need none of the packages; with the extra `oracles` the same is done with other weights and compared live.

A package is fetched as its wheel alone (`pip download --no-deps`) and unpacked to a folder of its own, since
two releases of one package are compared and their other dependencies (training, kernels) are not needed. For
the same reason the package's `__init__` is not run: only its module with the model is imported, in a process
of its own.

Data flow: `CASES` → wheel → model → weights with power → `model.…` and `expected.npz`. To write all again:

    python -m tests.palm_originals

Worked example: `palm_rlhf_0.2.4` multiplies by gamma + 1 where `palm_rlhf_0.2.1` does by gamma.
"""

import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.readers.options import ReaderOptions
from tests.huggingface_models import EXPECTED, decided, reference

FOLDER = Path(__file__).parent / "oracles" / "palm"
SIZES = {"num_tokens": 72, "dim": 32, "depth": 2, "dim_head": 8, "heads": 4}
Forward = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """One package: its wheel, the module with its model, its file, and what a reader has to be told.

    Attributes:
      gain_offset: what the package adds to a norm's gain.
    """

    wheel: str
    module: str
    file: str
    options: ReaderOptions = ReaderOptions()
    gain_offset: int = 0


_RLHF = "palm_rlhf_pytorch.palm"
CASES = {
    "palm_jax_0.1.2": Case("PaLM-jax==0.1.2", "palm_jax.palm", "model.eqx", ReaderOptions(dim_head=8)),
    "palm_pytorch_0.2.2": Case("PaLM-pytorch==0.2.2", "palm_pytorch.palm_pytorch", "model.pt"),
    "palm_rlhf_0.2.1": Case("PaLM-rlhf-pytorch==0.2.1", _RLHF, "model.pt", ReaderOptions(0)),
    "palm_rlhf_0.2.4": Case("PaLM-rlhf-pytorch==0.2.4", _RLHF, "model.pt", ReaderOptions(1), 1),
    "palm_rlhf_0.8.0": Case("palm-rlhf-pytorch==0.8.0", _RLHF, "model.pt", ReaderOptions(1), 1),
}


def run_original(name: str, first_seed: int, folder: Path) -> None:
    """Writes a case's model and what its package computes, in a process that knows this release only."""
    with tempfile.TemporaryDirectory() as scratch:
        words = ["download", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "--dest"]
        subprocess.run([sys.executable, "-m", "pip", *words, scratch, CASES[name].wheel], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        words = ["-m", "tests.palm_originals", name, str(first_seed), scratch, str(folder)]
        subprocess.run([sys.executable, *words], check=True, cwd=Path(__file__).parents[1])


def _write(name: str, first_seed: int, packages: Path, folder: Path) -> None:
    """Draws models until one's greedy tokens are decided, and saves it."""
    module = _import(CASES[name].module, packages)
    build = _jax_model if name.startswith("palm_jax") else _torch_model
    for seed in range(first_seed, first_seed + 400):
        forward, save = build(module, CASES[name], np.random.default_rng(seed))
        expected = reference(forward, seed)
        if decided(expected):
            break
    else:
        raise AssertionError(f"no seed gives a decided text for {name}")
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / CASES[name].file)
    np.savez(folder / EXPECTED, **{key: expected[key] for key in ("ids", "logits", "greedy")})
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(json.dumps({"case": name, "bytes": size, "gap": round(float(expected["gap"]), 5)}))


def _import(module: str, packages: Path) -> Any:
    """A module of an unpacked wheel, without its package's `__init__`."""
    package = module.partition(".")[0]
    bare = types.ModuleType(package)
    bare.__path__ = [str(packages / package)]
    sys.modules[package] = bare
    return importlib.import_module(module)


def _drawn(
    name: str, shape: tuple[int, ...], summed: int, offset: int, rng: np.random.Generator
) -> np.ndarray:
    """A weight of power; `summed` is the number of inputs of a matrix."""
    if len(shape) == 1:
        return rng.uniform(0.6, 1.4, shape).astype(np.float32) - np.float32(offset)
    strength = 1.0 if "emb" in name else 2.0 if "out" in name or "wo" in name else 1.5
    return rng.standard_normal(shape, np.float32) * np.float32(strength / summed**0.5)


def _torch_model(module: Any, case: Case, rng: np.random.Generator) -> tuple[Forward, Callable[[Path], None]]:
    """A PyTorch PaLM; its output projection is its embedding."""
    import torch

    model = module.PaLM(**SIZES).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            shape = tuple(weight.shape)
            weight.copy_(torch.tensor(_drawn(name, shape, shape[-1], case.gain_offset, rng)))

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits: np.ndarray = model(torch.tensor(ids)).float().numpy()
        return logits

    return forward, lambda path: torch.save(model.state_dict(), path)


def _jax_model(module: Any, case: Case, rng: np.random.Generator) -> tuple[Forward, Callable[[Path], None]]:
    """PaLM-jax's PaLM, run without its `jit`, which new releases of JAX refuse (an array as static field)."""
    import equinox
    import jax

    model = module.PaLM(**SIZES, key=jax.random.key(0))
    leaves, tree = jax.tree_util.tree_flatten_with_path(model)
    drawn = [
        _drawn(jax.tree_util.keystr(path), leaf.shape, leaf.shape[-1 if "emb" in str(path) else 0], 0, rng)
        for path, leaf in leaves
    ]
    model = jax.tree.unflatten(tree, drawn)
    whole = type(model).__call__.__wrapped__

    def forward(ids: np.ndarray) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            return np.stack([np.asarray(whole(model, row)) for row in ids])

    return forward, lambda path: equinox.tree_serialise_leaves(path, model)


def main() -> None:
    """Writes every folder again, or (as the process of one release) one case."""
    if len(sys.argv) > 1:
        name, seed, packages, folder = sys.argv[1:]
        _write(name, int(seed), Path(packages), Path(folder))
        return
    for name in CASES:
        run_original(name, 0, FOLDER / name)


if __name__ == "__main__":
    main()
