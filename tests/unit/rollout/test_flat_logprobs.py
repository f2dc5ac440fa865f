"""Log-probs of a completion in vLLM's flat form, and how many slots its engine has."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.rollout.vllm_host import check_engine_arguments
from megatron_dcpo.types import Prompt
from tests.helpers.vllm import needs_vllm

PROMPT = Prompt("p", (), (1, 2), "", "")


@pytest.fixture
def engine():
    made = object.__new__(VllmEngine)
    made.options, made.weights_version, made.eos_token_ids = (
        EngineOptions(raw_logprobs=True),
        0,
        (0,),
    )
    return made


@needs_vllm
@pytest.mark.parametrize("tops", [0, 2])
def test_flat_logprobs_are_read_as_they_are_written(engine, tops):
    """By vLLM's own container: of every position the sampled token first, then the K best, whether
    it is one of them.
    """
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs

    params = engine._params(SamplingConfig(top_logprobs=tops), 1, PROMPT, 0, None, False)
    assert params.flat_logprobs
    assert params.logprobs == tops
    flat = create_sample_logprobs(params.flat_logprobs)
    rows = [([7, 7, 3], [-0.5, -0.5, -1.0], 1), ([9, 4, 5], [-4.0, -0.25, -2.0], 6)]
    for tokens, logprobs, rank in rows:
        width = 1 + tops
        append_logprobs_for_next_position(
            flat, tokens[:width], logprobs[:width], [None] * width, rank, tops
        )
    completion = SimpleNamespace(
        token_ids=[7, 9], logprobs=flat, finish_reason="stop", weight_versions=None
    )
    response = engine._response(PROMPT, 0, completion, tops, 1)
    assert response.logprobs.tolist() == [-0.5, -4.0]
    assert response.logprobs.dtype == np.float32
    assert (
        response.top_logprobs is None
        if not tops
        else response.top_logprobs.tolist() == [[-0.5, -1.0], [-0.25, -2.0]]
    )


@pytest.mark.parametrize(
    ("slots", "asked", "expected"), [(512, 256, 256), (512, 1024, 512), (512, 0, 512)]
)
def test_no_more_slots_than_responses(slots, asked, expected):
    assert EngineOptions(max_num_seqs=slots, responses=asked).at_once == expected


@needs_vllm
def test_cuda_graphs_may_leave_with_the_rest():
    """``sleep_mode_offload_cudagraph`` of vllm/config/model.py is handed on by its name."""
    check_engine_arguments({"sleep_mode_offload_cudagraph": True})
