"""The layers of every pipeline stage. Megatron's ``get_num_layers_to_build`` and
``get_transformer_layer_offset`` give them for one rank of a process group; here they are computed
for every model chunk of a layout at once and without a group, because a plan is made without one,
and for more ranks than there are.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import TypeVar

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.layout import Layout

Number = TypeVar("Number", int, float)

_REPEATED = (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})")  # (tt|)*3, then t*3


@functools.lru_cache(maxsize=1024)
def chunk_layers(num_layers: int, layout: Layout) -> tuple[range, ...]:
    """Return the layers, counted from 0, of every model chunk in the model's order. The chunk of
    pipeline stage ``p`` and virtual stage ``v`` is at index ``v * PP + p``.

    Raises :class:`UserError` for a split that does not add up to ``num_layers`` or leaves a chunk
    without a layer.
    """
    stages = layout.pipeline_model_parallel_size * layout.virtual_pipeline_model_parallel_size
    layout_text = layout.pipeline_model_parallel_layout
    if layout_text is None:
        counts = _computed(num_layers, layout)
    else:
        counts = _written(num_layers, layout_text, stages)
    if min(counts) < 1:
        raise UserError(
            f"parallel: the pipeline's {stages} stage(s), virtual ones counted, would have "
            f"{'-'.join(map(str, counts))} of the model's {num_layers} layers; every stage needs "
            "one"
        )
    edges = [0, *itertools.accumulate(counts)]
    return tuple(range(first, last) for first, last in itertools.pairwise(edges))


def layers_per_stage(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of every pipeline stage, all its chunks together."""
    return sums_of_stages([1] * num_layers, layout)


def sums_of_stages(layer_values: Sequence[Number], layout: Layout) -> tuple[Number, ...]:
    """Return for every pipeline stage the sum of what ``layer_values`` has for its layers."""
    pp = layout.pipeline_model_parallel_size
    chunks = chunk_layers(len(layer_values), layout)
    return tuple(
        sum(layer_values[layer] for chunk in chunks[stage::pp] for layer in chunk)
        for stage in range(pp)
    )


def _written(num_layers: int, layout_text: str, stages: int) -> list[int]:
    """Return the layers of each chunk in ``pipeline_model_parallel_layout``, in which ``E`` is the
    embedding, ``t`` a layer, and ``L`` the output layer.
    """
    text = layout_text.replace(",", "")
    for pattern in _REPEATED:
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    parts = text.split("|")
    problem = ""
    if not re.fullmatch("E[t|]*L", text):
        problem = (
            "is not E (embedding), t (a layer each) and L (output layer) in that order, with | "
            "between stages"
        )
    elif len(parts) != stages:
        problem = f"has {len(parts)} stages; PP x VPP = {stages}"
    elif text.count("t") != num_layers:
        problem = f"has {text.count('t')} layers t; the model has {num_layers}"
    if problem:
        raise UserError(f"parallel.megatron.pipeline_model_parallel_layout={layout_text} {problem}")
    return [part.count("t") for part in parts]


def _computed(num_layers: int, layout: Layout) -> list[int]:
    """Return the layers of each chunk: equal numbers, except for stages with a configured number,
    and a layer less if the embedding or the output layer counts as one.
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    embedding = layout.account_for_embedding_in_pipeline_split
    loss = layout.account_for_loss_in_pipeline_split
    ends = {
        0: layout.num_layers_in_first_pipeline_stage,
        pp - 1: layout.num_layers_in_last_pipeline_stage,
    }
    configured = {stage: layers for stage, layers in ends.items() if layers}
    remaining = num_layers + embedding + loss - sum(configured.values())
    others = pp - len(configured)
    equal = remaining // max(others, 1)
    counts = [configured.get(stage, equal) for stage in range(pp)]
    divides = remaining >= 0 and remaining == equal * others
    if not divides or any(layers % vp for layers in counts):
        what = f"{num_layers} layers"
        if embedding or loss:
            what += " and what counts as one"
        if configured:
            numbers = " and ".join(map(str, configured.values()))
            what += f" less {numbers} of the first or last stage"
        raise UserError(
            f"parallel.pipeline_model_parallel_size={pp} (x virtual stages = {pp * vp}) does not "
            f"divide the model's {what}; choose a divisor, or split them unevenly: "
            "parallel.megatron.num_layers_in_first_pipeline_stage, "
            "num_layers_in_last_pipeline_stage or pipeline_model_parallel_layout"
        )
    counts = [layers // vp for layers in counts] * vp
    counts[0] -= embedding
    counts[-1] -= loss
    return counts
