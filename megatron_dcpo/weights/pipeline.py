"""Which layers stand where in the pipeline: what Megatron's ``get_num_layers_to_build`` and
``get_transformer_layer_offset`` say of a process group's rank, for every model chunk of a layout at
once and without a group: a plan is made where there is no process group, and for more ranks than
there are here.
"""

from __future__ import annotations

import functools
import itertools
import re

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.layout import Layout

_REPEATED = (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})")  # (tt|)*3, then t*3


@functools.lru_cache(maxsize=1024)
def chunk_layers(num_layers: int, layout: Layout) -> tuple[range, ...]:
    """Return the layers, counted from 0, of every model chunk in the model's order: of pipeline
    stage ``p``, virtual stage ``v`` at ``v * PP + p``.

    Raises :class:`UserError` for a split that does not add up to ``num_layers`` or leaves a chunk
    without a layer.
    """
    stages = layout.pipeline_model_parallel_size * layout.virtual_pipeline_model_parallel_size
    given = layout.pipeline_model_parallel_layout
    if given is None:
        counts = _computed(num_layers, layout)
    else:
        counts = _written(num_layers, given, stages)
    if min(counts) < 1:
        raise UserError(
            f"parallel: the pipeline's {stages} stage(s), virtual ones counted, would have "
            f"{'-'.join(map(str, counts))} of the model's {num_layers} layers; every stage needs "
            "one"
        )
    return tuple(
        range(*bounds) for bounds in itertools.pairwise([0, *itertools.accumulate(counts)])
    )


def layers_per_stage(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of every pipeline stage, all its chunks together."""
    pp = layout.pipeline_model_parallel_size
    chunks = chunk_layers(num_layers, layout)
    return tuple(sum(map(len, chunks[stage::pp])) for stage in range(pp))


def _written(num_layers: int, given: str, stages: int) -> list[int]:
    """Return the layers of each chunk in ``pipeline_model_parallel_layout``: ``E`` embedding, ``t``
    a layer, ``L`` output layer.
    """
    text = given.replace(",", "")
    for pattern in _REPEATED:
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    parts = text.split("|")
    problem = ""
    if not re.fullmatch("E[t|]*L", text):
        problem = "is not E (embedding), t (a layer each) and L (output layer) in that order, with | between stages"
    elif len(parts) != stages:
        problem = f"has {len(parts)} stages; PP x VPP = {stages}"
    elif text.count("t") != num_layers:
        problem = f"has {text.count('t')} layers t; the model has {num_layers}"
    if problem:
        raise UserError(f"parallel.megatron.pipeline_model_parallel_layout={given} {problem}")
    return [part.count("t") for part in parts]


def _computed(num_layers: int, layout: Layout) -> list[int]:
    """Return the layers of each chunk: equal, but for the stages that have a number of their own,
    and less a layer where the embedding or the output layer counts as one.
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    embedding = layout.account_for_embedding_in_pipeline_split
    loss = layout.account_for_loss_in_pipeline_split
    ends = {
        0: layout.num_layers_in_first_pipeline_stage,
        pp - 1: layout.num_layers_in_last_pipeline_stage,
    }
    own = {stage: layers for stage, layers in ends.items() if layers}
    left = num_layers + embedding + loss - sum(own.values())
    others = pp - len(own)
    middle = left // max(others, 1)
    counts = [own.get(stage, middle) for stage in range(pp)]
    if left < 0 or left != middle * others or any(layers % vp for layers in counts):
        what = f"{num_layers} layers" + " and what counts as one" * (embedding or loss)
        if own:
            less = f" less {' and '.join(map(str, own.values()))} of the first or last stage"
        else:
            less = ""
        raise UserError(
            f"parallel.pipeline_model_parallel_size={pp} (x virtual stages = {pp * vp}) does not "
            "divide the model's "
            f"{what}{less}; choose a divisor, or split them unevenly: "
            "parallel.megatron.num_layers_in_first_pipeline_stage, "
            "num_layers_in_last_pipeline_stage or pipeline_model_parallel_layout"
        )
    counts = [layers // vp for layers in counts] * vp
    counts[0] -= embedding
    counts[-1] -= loss
    return counts
