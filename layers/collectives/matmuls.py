"""x."""

import jax.numpy as jnp

from layers.collectives import latency, one_way, reference, throughput
from layers.collectives.mode import CollectiveConfig, CollectiveMode
from layers.collectives.products import Chunks

AG = {
    CollectiveMode.REFERENCE: reference.allgather_matmul_reference,
    CollectiveMode.ONE_WAY: one_way.allgather_matmul_one_way,
    CollectiveMode.THROUGHPUT: throughput.allgather_matmul_throughput,
    CollectiveMode.LATENCY: latency.allgather_matmul_latency,
}
RS = {
    CollectiveMode.REFERENCE: reference.matmul_reducescatter_reference,
    CollectiveMode.ONE_WAY: one_way.matmul_reducescatter_one_way,
    CollectiveMode.THROUGHPUT: throughput.matmul_reducescatter_throughput,
    CollectiveMode.LATENCY: latency.matmul_reducescatter_latency,
}


def allgather_matmul(x, w, axis_name, config, *, layer=None):
    return AG[config.mode](x, Chunks(w, layer), axis_name)


def matmul_reducescatter(x, w, axis_name, config, *, layer=None):
    return RS[config.mode](x, Chunks(w, layer), axis_name, jnp.dtype(config.reduce_dtype))
