"""Which layers a chunk has: Megatron's own functions say the same of every rank; a split that
cannot be is one line.
"""

import dataclasses
import itertools

import pytest
import torch

from megatron_dcpo.config import ParallelConfig, validate
from megatron_dcpo.config.parallel import PlannedOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.layout import UNEVEN_PIPELINE, Layout
from megatron_dcpo.weights.pipeline import chunk_layers, layers_per_stage
from megatron_dcpo.weights.planner import check_layout
from tests.unit.weights.test_planner import architecture

FIRST, LAST, EMBEDDING, LOSS, WRITTEN = UNEVEN_PIPELINE
PP = "pipeline_model_parallel_size"


def parallel(pp, vp=1, **options):
    megatron = {"virtual_pipeline_model_parallel_size": vp, **options}
    return ParallelConfig(pipeline_model_parallel_size=pp, megatron=megatron)


def layout_of(pp, vp=1, **options):
    return Layout.of(parallel(pp, vp, **options))


SPLITS = [
    (5, 2, 1, {FIRST: 2}, "2-3"),
    (5, 2, 1, {LAST: 1}, "4-1"),
    (5, 2, 1, {FIRST: 2, LAST: 3}, "2-3"),
    (6, 2, 2, {FIRST: 2, LAST: 4}, "1-2-1-2"),
    (5, 3, 1, {FIRST: 1}, "1-2-2"),
    (6, 2, 2, {FIRST: 2}, "1-2-1-2"),
    (10, 3, 2, {LAST: 2}, "2-2-1-2-2-1"),
    (12, 4, 2, {FIRST: 2, LAST: 2}, "1-2-2-1-1-2-2-1"),
    (5, 2, 1, {EMBEDDING: True}, "2-3"),
    (10, 3, 2, {EMBEDDING: True, LOSS: True}, "1-2-2-2-2-1"),
    (7, 2, 2, {LOSS: True}, "2-2-2-1"),
    (5, 2, 1, {WRITTEN: "Et*3|t*2L"}, "3-2"),
    (7, 2, 2, {WRITTEN: "Et,t|(t|)*2,t*3L"}, "2-1-1-3"),
    (40, 8, 1, {WRITTEN: "Et*5|(t*5|)*4(t*6|)*2t*3L"}, "5-5-5-5-5-6-6-3"),
    (36, 8, 1, {LAST: 1}, "5-5-5-5-5-5-5-1"),
    (8, 2, 2, {}, "2-2-2-2"),
]


@pytest.mark.parametrize(("layers", "pp", "vp", "options", "expected"), SPLITS)
def test_chunks_are_megatrons(monkeypatch, layers, pp, vp, options, expected):
    """``get_num_layers_to_build`` and ``get_transformer_layer_offset`` of every rank and virtual
    stage.
    """
    from megatron_dcpo.policy.model import transformer_config

    from megatron.core import parallel_state  # isort: skip
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    chunks = chunk_layers(layers, layout_of(pp, vp, **options))
    assert "-".join(str(len(chunk)) for chunk in chunks) == expected
    assert sum(layers_per_stage(layers, layout_of(pp, vp, **options))) == layers
    config = transformer_config(
        architecture(num_hidden_layers=layers), parallel(pp, vp, **options), torch.float32
    )
    monkeypatch.setattr(
        parallel_state,
        "get_virtual_pipeline_model_parallel_world_size",
        lambda: vp if vp > 1 else None,
    )
    for stage, virtual in itertools.product(range(pp), range(vp)):
        monkeypatch.setattr(
            parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage
        )
        at = config, virtual if vp > 1 else None, stage
        start, count = get_transformer_layer_offset(*at), get_num_layers_to_build(*at)
        assert chunks[virtual * pp + stage] == range(start, start + count), (stage, virtual)


@pytest.mark.parametrize(
    "text", ["Et*3|(tt|)*29,tL", "Ettt|(tt|)*3tL", "(Et|tt|)*1,t*2|tL", "Et|tt|t,t|t*12L"]
)
def test_written_layouts_read_as_megatron_does(text):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = [
        stage.count(LayerType.decoder)
        for stage in PipelineParallelLayerLayout.parse_str_to_list(text)
    ]
    ours = chunk_layers(sum(theirs), layout_of(len(theirs), **{WRITTEN: text}))
    assert [len(chunk) for chunk in ours] == theirs


@pytest.mark.parametrize(
    ("pp", "vp", "options", "message"),
    [
        (2, 1, {FIRST: 4}, "would have 4-0 of the model's 4 layers"),
        (2, 1, {FIRST: 5}, "does not divide the model's 4 layers less 5"),
        (2, 1, {FIRST: 1, LAST: 2}, "less 1 and 2 of the first or last stage"),
        (3, 1, {LAST: 1}, "less 1 of the first or last stage"),
        (2, 2, {FIRST: 1}, "(x virtual stages = 4) does not divide"),
        (2, 1, {EMBEDDING: True}, "4 layers and what counts as one"),
        (5, 1, {EMBEDDING: True}, "would have 0-1-1-1-1"),
        (2, 1, {WRITTEN: "Et*2|t|tL"}, "has 3 stages; PP x VPP = 2"),
        (2, 2, {WRITTEN: "Et*2|t*2L"}, "has 2 stages; PP x VPP = 4"),
        (2, 1, {WRITTEN: "Et*2|t*3L"}, "has 5 layers t; the model has 4"),
        (2, 1, {WRITTEN: "E|t*4L"}, "would have 0-4"),
        (2, 1, {WRITTEN: "Et*4|L"}, "would have 4-0"),
        (2, 1, {WRITTEN: "t*2E|t*2L"}, "is not E (embedding), t"),
        (2, 1, {WRITTEN: "Et*2|t*2mL"}, "is not E (embedding), t"),
        (2, 1, {WRITTEN: ""}, "is not E (embedding), t"),
        (2, 1, {WRITTEN: "E(t*999)*99999|tL"}, "is not E (embedding), t"),
    ],
)
def test_splits_that_cannot_be_are_refused(pp, vp, options, message):
    with pytest.raises(UserError) as refused:
        check_layout(architecture(), layout_of(pp, vp, **options))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({FIRST: 1, LOSS: True}, "divide the layers each in its own way"),
        ({WRITTEN: "Et|tL", LAST: 1}, "divide the layers each in its own way"),
        ({WRITTEN: "Et|tL", EMBEDDING: True}, "divide the layers each in its own way"),
        ({FIRST: 1, PP: 1}, "need parallel.pipeline_model_parallel_size > 1"),
        ({WRITTEN: "EtL", PP: 1}, "need parallel.pipeline_model_parallel_size > 1"),
        ({FIRST: 0}, "num_layers_in_first_pipeline_stage"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    values = {"run_dir": "r", "model": {"path": "m"}, "data": {"path": "d"}}
    parallel = {PP: options.pop(PP, 2), "megatron": options}
    with pytest.raises(UserError, match=message):
        validate(values | {"parallel": parallel})


def test_every_option_is_in_the_layout():
    in_layout = {field.name for field in dataclasses.fields(Layout)}
    planned = {field.name for field in dataclasses.fields(PlannedOptions)}
    assert set(UNEVEN_PIPELINE) <= in_layout & planned
