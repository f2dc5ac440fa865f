"""Which experts an engine's routers choose: recorded in the transformers engine, read from vLLM's
completions.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine import EngineError, append_segment
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.routing import every_rank_returns_experts
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.rollout.vllm_host import check_engine_arguments
from megatron_dcpo.training.preflight import check_model
from megatron_dcpo.types import Prompt
from tests.helpers.paths import EXAMPLES
from tests.helpers.vllm import needs_vllm, prompts_for_test


def test_choices_are_those_of_a_forward_pass(tiny_models):
    """In a batch that is padded, compacted and filled again, for every token but the last one of a
    response.
    """
    engine = TransformersEngine.from_pretrained(
        tiny_models("qwen3_moe", True), max_num_seqs=5, record_experts=True
    )
    engine.eos_token_ids = tuple(range(0, 331, 9))
    prompts = {prompt.prompt_id: prompt for prompt in prompts_for_test()}
    responses = engine.generate(list(prompts.values()), SamplingConfig(n=3, max_tokens=24))
    assert len({len(response.token_ids) for response in responses}) > 3
    for response in responses:
        ids = torch.tensor([*prompts[response.prompt_id].token_ids, *response.token_ids])
        with torch.no_grad():
            engine.model(ids[None, :-1])
        expected = engine._recorder.take(1)[0]
        assert expected.shape == (len(ids) - 1, 4, 3)
        assert (np.sort(response.experts, -1) == np.sort(expected, -1)).all()


def test_a_part_that_weights_have_interrupted_has_no_choices_of_vllm():
    """Unless what goes on behind it reads its tokens again."""
    engine = object.__new__(VllmEngine)
    engine.options, engine.weights_version = EngineOptions(record_experts=True), 0
    prompt = Prompt("p", (), (1, 2), "", "")
    begun = engine._response(prompt, 0, completion(None, finish_reason=None), 0, 1)
    assert (begun.finish_reason, begun.experts) == ("abort", None)
    experts = np.arange(7 * 2 * 3, dtype=np.uint8).reshape(7, 2, 3)
    new = engine._response(prompt, 0, completion(experts), 0, 1, before=3)
    assert append_segment(begun, new).experts is experts


def test_nothing_is_recorded_unasked(tiny_models):
    engine = TransformersEngine.from_pretrained(tiny_models("qwen3_moe", True))
    assert engine.generate(prompts_for_test()[:1], SamplingConfig(max_tokens=4))[0].experts is None


def completion(experts, finish_reason="length"):
    tokens = {"token_ids": [7, 8, 9], "logprobs": SimpleNamespace(logprobs=[-1.0] * 3)}
    return SimpleNamespace(
        **tokens, finish_reason=finish_reason, weight_versions=None, routed_experts=experts
    )


@pytest.mark.parametrize("record", [True, False])
def test_experts_of_a_completion_of_vllm(record):
    """``CompletionOutput.routed_experts`` [P + T - 1, layers, k] of vllm/outputs.py:
    ``take_output`` of the scheduler ends before the token that was sampled last.
    """
    engine = object.__new__(VllmEngine)
    engine.options, engine.weights_version = EngineOptions(record_experts=record), 0
    prompt, experts = (
        Prompt("p", (), (1, 2), "", ""),
        np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3),
    )
    response = engine._response(prompt, 0, completion(experts), 0, 1)
    assert (response.experts is experts) if record else response.experts is None
    for wrong in (None, experts[1:]):
        if record:
            with pytest.raises(EngineError, match=r"the experts of (none|3) tokens, not of 4"):
                engine._response(prompt, 0, completion(wrong), 0, 1)


@needs_vllm
def test_names_of_vllm():
    """What is set and replaced is there; its name in ``rollout.vllm`` is refused."""
    from vllm.distributed.aux_output_connector import worker
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import CompletionOutput

    assert EngineArgs.enable_return_routed_experts is False
    assert CompletionOutput.routed_experts is None
    group = worker.get_tp_group
    with every_rank_returns_experts():
        assert worker.get_tp_group().is_first_rank
    assert worker.get_tp_group is group
    with pytest.raises(
        UserError,
        match=r"enable_return_routed_experts is decided by rollout\.routing_replay; remove it",
    ):
        check_engine_arguments({"enable_return_routed_experts": True})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "has no experts; remove it"),
        (
            ["parallel.megatron.moe_router_fusion=true", "model.path=moe/policy"],
            "moe_router_fusion; remove one of them",
        ),
    ],
)
def test_refused_with_the_model(overrides, message, monkeypatch):
    monkeypatch.chdir(EXAMPLES / "quickstart")
    config = load_config(
        "dcpo.yaml", ["model.path=policy", "rollout.routing_replay=true", *overrides]
    )
    with pytest.raises(UserError, match=message):
        check_model(config)
