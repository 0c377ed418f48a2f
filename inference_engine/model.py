"""What the steps ask of a model: the same verbs on one device and on a mesh.

`OneDeviceModel` runs `layers.serial`, `layers.transformer.MeshModel` a layout over chips; the steps know
neither. Specs say how arrays lie on a mesh; on one device nothing reads them.

Data flow: flags → `Model` → `steps.build_steps` → executables.

Worked example: for a vocabulary of 2048 on 3 chips `padded_vocab` is 2049, and on one device 2048.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from layers import serial
from layers.embedding import unembed
from layers.hparams import HParams
from layers.kv_cache import CacheShape, KVCache
from layers.layout import AttentionAxes
from layers.params import Params
from layers.shared_prefix import SharedPrefixes


@runtime_checkable
class Model(Protocol):
    """A model's form and where it runs; `forward` and `logits` work on one chip's arrays."""

    @property
    def hparams(self) -> HParams:
        """The model as it is, nothing padded."""

    @property
    def options(self) -> serial.ForwardOptions:
        """How forward passes compute."""

    @property
    def padded_vocab(self) -> int:
        """The vocabulary as its shards hold it together."""

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Mesh axes of the logits' vocabulary, major first."""

    @property
    def attention(self) -> AttentionAxes | None:
        """How the cache's rows and heads lie on the mesh; None on one device."""

    @property
    def padded_kv_heads(self) -> int:
        """kv heads as the mesh holds them."""

    def cache_shape(self, rows: int, time: int) -> CacheShape:
        """The whole cache's sizes for `rows` sequences."""

    def shared_shape(self, entries: int, time: int) -> CacheShape:
        """Sizes of the cache of shared prefixes."""

    @property
    def batch_shards(self) -> int:
        """Parts that attention splits the batch into, each with a copy of what is shared."""

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        start: jax.Array,
        cache: KVCache,
        shared: SharedPrefixes | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See `serial.forward`."""

    def logits(self, params: Params, x: jax.Array, rows: int) -> jax.Array:
        """Float32 logits of this chip's part of the vocabulary, for the first `rows` rows of the residual."""

    def param_specs(self, params: Params) -> Any:
        """Where each weight lies."""

    def cache_specs(self, cache: KVCache) -> Any:
        """Where keys and values lie."""

    def shared_specs(self, cache: KVCache) -> Any:
        """Where shared prefixes lie."""

    def sharded(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` of one chip's arrays as a function of whole arrays."""

    def placed(self, specs: Any) -> Any:
        """Shardings for specs."""


@dataclasses.dataclass(frozen=True)
class OneDeviceModel:
    """A model on one device: no mesh, no collectives."""

    hparams: HParams
    options: serial.ForwardOptions = serial.ForwardOptions()

    @property
    def padded_vocab(self) -> int:
        """Nothing is padded."""
        return self.hparams.vocab

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """No mesh."""
        return ()

    @property
    def attention(self) -> None:
        """No mesh."""

    @property
    def padded_kv_heads(self) -> int:
        """Nothing is padded."""
        return self.hparams.kv_heads

    def cache_shape(self, rows: int, time: int) -> CacheShape:
        """Nothing is padded."""
        hparams = self.hparams
        return CacheShape(hparams.layers, rows, hparams.kv_heads, time, hparams.qkv)

    def shared_shape(self, entries: int, time: int) -> CacheShape:
        """The same."""
        return self.cache_shape(entries, time)

    @property
    def batch_shards(self) -> int:
        """No mesh."""
        return 1

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        start: jax.Array,
        cache: KVCache,
        shared: SharedPrefixes | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """`serial.forward`."""
        x, written = serial.forward(self.hparams, params, tokens, start, cache, self.options, shared)
        assert written is not None  # a cache in is a cache out
        return x, written

    def logits(self, params: Params, x: jax.Array, rows: int) -> jax.Array:
        """`embedding.unembed`; there are no other rows."""
        del rows
        return unembed(self.hparams, params, x)

    def param_specs(self, params: Params) -> None:
        """No mesh."""

    def cache_specs(self, cache: KVCache) -> None:
        """No mesh."""

    def shared_specs(self, cache: KVCache) -> None:
        """No mesh."""

    def sharded(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function itself."""
        del in_specs, out_specs
        return function

    def placed(self, specs: Any) -> None:
        """Wherever the arguments are."""
