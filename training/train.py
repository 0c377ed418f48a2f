"""Trains the default checkpoint: a small PaLM on Shakespeare, in float32 on a CPU.

The loss runs through the engine's own forward pass: the neutral state is the set of trained variables,
`preprocess` folds it inside the step, and gradients flow back through the folding.

Data flow: tokens.npz (corpus.py, tokenizer_model.py) → random windows → AdamW on the neutral state →
state.npz after every evaluation → export.py.

    python -m training.train --tokens WORK/tokens.npz --out WORK --minutes 95

With --context_parallel 8 every window is cut over 8 devices: each holds all weights and an eighth of the
activations, and attention runs round the ring.

The budget is time, since that is what a small machine has: the learning rate follows a cosine over the
share of the minutes that is gone, and the record says how many steps they held.

Worked example: 4 windows of 512 tokens are 2048 tokens a step; at 1,000 tokens/s 95 minutes hold 2,800
steps or 5.7 million tokens, 3.4 passes over the training plays.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from checkpoints.preprocess import preprocess
from checkpoints.state import state_spec
from configs.models import palm_shakespeare
from layers import serial
from layers.attention import AttentionBlocks, attend
from layers.context_parallel import ContextParallel
from layers.embedding import unembed
from layers.errors import UserError
from layers.hparams import HParams
from layers.mesh import make_mesh
from layers.mesh_shape import MeshShape
from layers.params import Params

Weights = dict[str, jax.Array]
RECORD = "record.json"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run; it ends with its minutes or its steps, whichever is first."""

    minutes: float = 95.0
    max_steps: int = 1_000_000
    batch: int = 4
    time: int = 512
    learning_rate: float = 2e-3
    embedding_multiplier: float = 8.0
    warmup: int = 50
    weight_decay: float = 0.1
    evaluate_every: int = 200
    seed: int = 0


def init_state(hparams: HParams, seed: int) -> Weights:
    """Random neutral state: unit-variance embedding, kernels by fan-in, outputs damped by depth."""
    rng, damping = np.random.default_rng(seed), 1 / math.sqrt(2 * hparams.layers)
    fan_in = {"o": hparams.heads * hparams.qkv, "w2": hparams.ff}
    weights = {}
    for key, shape in state_spec(hparams).items():
        name = key.rpartition("/")[2]
        if name.endswith("gain"):
            weights[key] = jnp.ones(shape, jnp.float32)
            continue
        std = 1.0 if name == "embedding" else 1 / math.sqrt(fan_in.get(name, hparams.embed))
        std *= damping if name in fan_in else 1.0
        weights[key] = jnp.asarray(rng.normal(0, std, shape), jnp.float32)
    return weights


def loss_fn(
    hparams: HParams, weights: Weights, tokens: jax.Array, context: ContextParallel | None = None
) -> jax.Array:
    """Mean negative log-likelihood in nats of tokens[:, 1:], int32 [batch, time + 1].

    With `context` each chip has a stretch of every text and the same weights.
    """
    params = preprocess(hparams, weights, jnp.dtype("float32"), stacked=False)
    attention = attend if context is None else context.attend

    def nats(params: Params, start: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        options = serial.ForwardOptions(blocks=AttentionBlocks(inputs.shape[1], inputs.shape[1]))
        x, _ = serial.forward(hparams, params, inputs, start, options=options, attention=attention)
        logits = unembed(hparams, params, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if context is None:
        return nats(params, jnp.zeros((), jnp.int32), inputs, targets)
    return context.mean(nats, params, inputs, targets)


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipping, at learning rate 1; the unit-variance embedding learns faster."""

    def decayed(weights: Weights) -> dict[str, bool]:
        return {key: leaf.ndim > 1 and key != "embedding" for key, leaf in weights.items()}

    def boost_embedding(updates: Weights, _: Weights | None = None) -> Weights:
        return updates | {"embedding": updates["embedding"] * config.embedding_multiplier}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
        optax.stateless(boost_embedding),
    )


def learning_rate(config: TrainConfig, step: int, progress: float) -> float:
    """Linear warm-up over steps, then a cosine to a twentieth over progress in 0 … 1."""
    warm = min(1.0, step / config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * warm * (0.05 + 0.95 * cosine)


def windows(tokens: np.ndarray, time: int) -> np.ndarray:
    """Consecutive windows [n, time + 1] that overlap by one token, so that each token is scored once."""
    count = (len(tokens) - 1) // time
    return np.stack([tokens[i * time : (i + 1) * time + 1] for i in range(count)]).astype(np.int32)


def evaluate(
    hparams: HParams, weights: Weights, data: np.ndarray, batch: int, context: ContextParallel | None = None
) -> float:
    """Mean nats per token over all full batches of windows of the validation tokens."""
    starts = range(0, len(data) - batch + 1, batch)
    losses = (_loss(hparams, weights, jnp.asarray(data[s : s + batch]), context) for s in starts)
    return float(np.mean([float(loss) for loss in losses]))


_loss = functools.partial(jax.jit, static_argnums=(0, 3))(loss_fn)


def save(path: pathlib.Path, weights: Weights, record: dict[str, float]) -> None:
    """Writes state.npz and record.json, each whole or not at all."""
    path.mkdir(parents=True, exist_ok=True)
    partial = path / "state.partial.npz"
    np.savez(partial, **{key: np.asarray(leaf) for key, leaf in weights.items()})  # type: ignore[arg-type]
    partial.rename(path / "state.npz")
    (path / RECORD).write_text(json.dumps(record, indent=1))


def train(
    config: TrainConfig,
    hparams: HParams,
    tokens_file: pathlib.Path,
    out: pathlib.Path,
    context: ContextParallel | None = None,
) -> None:
    """Runs the whole training and saves after every evaluation."""
    data = np.load(tokens_file)
    bytes_per_token = float(data["validation_bytes"]) / len(data["validation"])
    validation = windows(data["validation"], config.time)
    corpus, rng = data["train"], np.random.default_rng(config.seed)
    weights = init_state(hparams, config.seed)
    transform = optimizer(config)
    opt_state = transform.init(weights)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(
        weights: Weights, opt_state: optax.OptState, batch: jax.Array, rate: jax.Array
    ) -> tuple[Weights, optax.OptState, jax.Array]:
        loss, grads = jax.value_and_grad(functools.partial(loss_fn, hparams, context=context))(weights, batch)
        updates, opt_state = transform.update(grads, opt_state, weights)
        scaled = jax.tree.map(lambda u: -rate * u, updates)
        return optax.apply_updates(weights, scaled), opt_state, loss

    began, losses, step, progress = time.time(), [], 0, 0.0
    while progress < 1.0:
        step += 1
        progress = max((time.time() - began) / (60 * config.minutes), step / config.max_steps)
        starts = rng.integers(0, len(corpus) - config.time - 1, config.batch)
        batch = np.stack([corpus[s : s + config.time + 1] for s in starts]).astype(np.int32)
        rate = jnp.asarray(learning_rate(config, step, progress), jnp.float32)
        weights, opt_state, loss = update(weights, opt_state, jnp.asarray(batch), rate)
        losses.append(float(loss))
        if step % config.evaluate_every == 0 or progress >= 1.0:
            nats = evaluate(hparams, weights, validation, config.batch, context)
            record = {
                "step": step,
                "tokens": step * config.batch * config.time,
                "seconds": time.time() - began,
                "train_nats_per_token": float(np.mean(losses[-config.evaluate_every :])),
                "validation_nats_per_token": nats,
                "validation_bits_per_byte": nats / math.log(2) / bytes_per_token,
            }
            save(out, weights, record)
            print(json.dumps(record), flush=True)


def over_devices(count: int) -> ContextParallel | None:
    """Windows cut over the first `count` devices, on a CPU over as many host devices; None for one."""
    if count == 1:
        return None
    if count < 1:
        raise UserError(f"--context_parallel is {count}; allowed: 1 or more; nearest: 1")
    jax.config.update("jax_num_cpu_devices", count)
    return ContextParallel(make_mesh(MeshShape(count, 1, 1)), ("x",))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=pathlib.Path, required=True, help="tokens.npz of tokenizer_model")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="folder for state.npz and record.json"
    )
    parser.add_argument("--minutes", type=float, default=TrainConfig.minutes)
    parser.add_argument("--learning_rate", type=float, default=TrainConfig.learning_rate)
    parser.add_argument("--evaluate_every", type=int, default=TrainConfig.evaluate_every)
    parser.add_argument("--time", type=int, default=TrainConfig.time, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=TrainConfig.batch, help="windows of a step")
    parser.add_argument("--max_steps", type=int, default=TrainConfig.max_steps)
    parser.add_argument(
        "--context_parallel", type=int, default=1, help="devices over which every window is cut"
    )
    args = vars(parser.parse_args())
    tokens, out, devices = args.pop("tokens"), args.pop("out"), args.pop("context_parallel")
    try:
        train(TrainConfig(**args), palm_shakespeare(), tokens, out, over_devices(devices))
    except UserError as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
