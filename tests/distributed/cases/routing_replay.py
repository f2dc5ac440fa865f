"""One rank: an engine whose routers choose experts that nobody else would; the policy's log-probs
with and without them.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import torch

from megatron_dcpo.policy.model import build_policy
from megatron_dcpo.policy.optimizer import PolicyOptimizer
from megatron_dcpo.policy.schedule import accumulate_gradients, compute_logprobs
from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.engine import PartialRollout
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.sessions import Call, PlannedCall, Session, SessionLimits, Turn
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.types import (
    CONFIDENCE_TAG,
    Response,
    ResponseKey,
    TrainingSample,
    replaced,
)
from tests.distributed.cases.common import (
    config_for_test,
    initialize_layout,
    parallel_config,
    shared_out,
)
from tests.helpers.chat_policy import chat_tokens, prompt_of
from tests.helpers.samples import bare
from tests.helpers.vllm import prompts_for_test


def choose_otherwise(
    router: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As Qwen3MoeTopKRouter.forward, with experts chosen by their scores and a preference for later
    ones.
    """
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    scores = torch.softmax(logits, -1, torch.float)
    chosen = (scores + torch.linspace(0, 0.5, router.num_experts)).topk(router.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def choose_otherwise_by_sigmoid(
    router: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As Glm4MoeTopkRouter.forward, with experts chosen by the preference and not by the correction
    bias.
    """
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    scores = logits.sigmoid()
    preferred = scores + torch.linspace(0, 0.5, router.num_experts)
    chosen = preferred.topk(router.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor
    return logits, weights, chosen


ROUTERS = {
    "Qwen3MoeTopKRouter": choose_otherwise,
    "Glm4MoeTopkRouter": choose_otherwise_by_sigmoid,
    "Dots1TopkRouter": choose_otherwise_by_sigmoid,
}


def engine_of(model: str) -> TransformersEngine:
    """The engine whose routers choose otherwise."""
    engine = TransformersEngine.from_pretrained(model, max_num_seqs=5, record_experts=True)
    for module in engine.model.modules():
        choose = ROUTERS.get(type(module).__name__)
        if choose is not None:
            module.forward = MethodType(choose, module)
    return engine


def at_once(model: str) -> list[Any]:
    """Samples of the engine's, equal on every rank, in two batches, of several lengths."""
    engine = engine_of(model)
    engine.eos_token_ids = tuple(range(0, 331, 9))
    prompts = {prompt.prompt_id: prompt for prompt in prompts_for_test()}
    responses = engine.generate(list(prompts.values()), SamplingConfig(n=2, max_tokens=16))
    return [
        replaced(bare(prompts[r.prompt_id].token_ids, r.token_ids), response=r) for r in responses
    ]


def in_parts(model: str) -> list[Any]:
    """The same, of partial rollouts that end after seven steps each."""
    engine = engine_of(model)
    engine.eos_token_ids = tuple(range(0, 331, 9))
    waiting = {(prompt.prompt_id, i): (prompt, i) for prompt in prompts_for_test() for i in (0, 1)}
    begun: dict[ResponseKey, Response] = {}
    samples = []
    while waiting:
        steps = iter(range(7))
        cut = PartialRollout(lambda steps=steps: next(steps, 7) >= 6, dict(begun))
        streamed = engine.stream(list(waiting.values()), SamplingConfig(max_tokens=24), 0, cut)
        for response in (one for responses in streamed for one in responses):
            if response.finish_reason == "abort":
                begun[response.key] = response
                continue
            prompt, _ = waiting.pop(response.key)
            sample = bare(prompt.token_ids, response.token_ids)
            samples.append(replaced(sample, response=response))
    return samples


def in_sessions(model: str) -> list[Any]:
    """Sessions of two conversations, one of them of two turns, with a confidence behind each answer
    that states none.
    """
    engine, chat = engine_of(model), chat_tokens()
    limits = SessionLimits(response_tokens=200, sequence_tokens=400, calls=9)
    return [session_of(engine, chat, number, limits) for number in range(4)]


def session_of(
    engine: TransformersEngine, chat: ChatTokens, number: int, limits: SessionLimits
) -> TrainingSample:
    question: dict[str, Any] = {"role": "user", "content": f"{number}*7="}
    prompt = prompt_of([question], chat, prompt_id=f"p{number}")
    session = Session(prompt=prompt, index=0, chat=chat, limits=limits)

    def sample(planned: PlannedCall) -> Response:
        prompt_of_call = replace(
            prompt, prompt_id=planned.names[0], token_ids=planned.prompt.token_ids
        )
        arrivals = Arrivals()
        arrivals.put(EngineCall(prompt_of_call, 0, planned.max_tokens))
        arrivals.close()
        served = engine.serve(arrivals, SamplingConfig(max_tokens=200))
        (response,) = (one for responses in served for one in responses)
        return response

    def turn(*messages: dict[str, Any]) -> Turn:
        call = Call(messages=messages, max_tokens=9)
        planned = session.plan(call, session.encode(call))
        (answered,) = session.commit(planned, [sample(planned)])
        return answered

    turn({"role": "system", "content": "Plan."}, question)
    first = turn(question)
    turn(*first.history, {"role": "user", "content": "Go on."})
    for one in session.ask_earlier_confidences(CONFIDENCE_TAG):
        session.add_earlier_confidence(one, sample(one), CONFIDENCE_TAG)
    last = session.ask_confidence(CONFIDENCE_TAG)
    if last is not None:
        session.add_confidence(last, sample(last))
    response = session.response()
    return replaced(bare(prompt.token_ids, response.token_ids), response=response)


ROLLOUTS = {"at once": at_once, "in parts": in_parts, "in sessions": in_sessions}


def run(options: dict[str, Any]) -> Any:
    parallel = parallel_config(options.get("parallel", {}))
    topology = initialize_layout(parallel)
    config = config_for_test(options["model"], "fp32", parallel, lr=1e-2)
    policy = build_policy(config.model, parallel, topology)
    optimizer = PolicyOptimizer(policy, config)
    samples = ROLLOUTS[options.get("rollout", "at once")](options["model"])
    mine, splits = shared_out(samples, parallel, topology, 2, max_tokens=60)
    total = sum(len(sample.response_ids) for sample in samples)
    forward = {"temperature": 1.0, "packing": parallel.sequence_packing}

    def loss(batch, outputs):
        return -((1 + batch.targets % 3).float() / total * outputs.logprobs), {}

    found: dict[str, Any] = {"lengths": [len(sample.response_ids) for sample in samples]}
    found["sequences"] = [len(sample.sequences) for sample in samples]
    for replay in (True, False):
        chosen = [
            samples[i]
            if replay
            else replaced(samples[i], response=replaced(samples[i].response, experts=None))
            for i in mine
        ]
        ours = compute_logprobs(policy, chosen, splits, **forward)
        gaps = np.concatenate(
            [
                np.abs(a - samples[i].response.logprobs)[samples[i].response.loss_mask]
                if samples[i].response.loss_mask is not None
                else np.abs(a - samples[i].response.logprobs)
                for a, i in zip(ours, mine, strict=True)
            ]
        )
        optimizer.zero_gradients()
        parts = accumulate_gradients(policy, chosen, splits, loss, **forward)
        every = all_gather_objects(parts if topology.reports else [])
        name = "replayed" if replay else "alone"
        found |= {f"{name}/gaps": gaps.tolist(), f"{name}/norm": optimizer.gradient_norm()}
        found[f"{name}/loss"] = sum(part["loss"] for rank in every for part in rank)
    return found
