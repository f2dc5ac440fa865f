"""How long an engine decodes the responses of a step.

All running sequences advance together, one token in each decoding step, until the longest response
has ended: the last steps are taken by few sequences and cost nearly as much as full ones. What a
step costs is :class:`DecodingCosts`; what is running is followed response by response
(:func:`decoding_steps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.config import Config
from megatron_dcpo.planning.engine_memory import EngineMemory
from megatron_dcpo.planning.machine import Rates
from megatron_dcpo.planning.traffic import Work
from megatron_dcpo.weights.arithmetic import operations_per_token
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.table import number_of_parameters

SPREAD = 0.7  # sigma of log-normal lengths
_TOKENS = 64  # between two looks at the cache


@dataclass(frozen=True)
class DecodingCosts:
    """What a decoding step of ``n`` sequences costs, in seconds.

    step: whatever runs: the launches of each layer, the latency of its all-reduces.
    dense: reading all weights but those of experts.
    experts: reading all experts, each of which gets a token with the probability ``chosen``.
    arithmetic, sequence: for each sequence, what its products take, and its share of scheduling,
        sampling and log-probs.
    kv: for each sequence and token of its context.
    """

    step: float
    dense: float
    experts: float
    chosen: float
    arithmetic: float
    sequence: float
    kv: float

    def seconds(self, n: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Return the seconds of steps of ``n`` sequences of ``context`` tokens. Products and the
        reading of their weights overlap.
        """
        read = self.dense + self.experts * (1 - (1 - self.chosen) ** n)
        products = np.maximum(read, n * self.arithmetic)
        return self.step + products + n * (self.sequence + self.kv * context)


def decoding_costs(arch: Architecture, engine: EngineMemory, rates: Rates) -> DecodingCosts:
    """Return the costs of an engine's decoding steps."""
    size = engine.tensor_model_parallel_size
    bytes_per_second = rates.hbm_gbps * 1e9 * rates.hbm_share
    step = arch.num_layers * rates.decode_layer_us * 1e-6
    if size > 1:
        step += 2 * arch.num_layers * rates.all_reduce_us * 1e-6
    if size > rates.gpus_per_node:
        step += rates.across_nodes_ms * 1e-3
    layers = sum(arch.has_experts(layer) for layer in range(arch.num_layers))
    experts = 3 * arch.hidden_size * arch.ffn_hidden_size * arch.num_experts * layers
    expert_bytes = engine.weights * experts / number_of_parameters(arch)
    operations = operations_per_token(arch, Layout(tensor_model_parallel_size=size), length=0.0)
    per_second = size * rates.peak_tflops * 1e12 * rates.mfu
    return DecodingCosts(
        step=step,
        dense=(engine.weights - expert_bytes) / bytes_per_second,
        experts=expert_bytes / bytes_per_second,
        chosen=arch.experts_per_token / max(1, arch.num_experts),
        arithmetic=(sum(operations.dense) + sum(operations.experts) + operations.output)
        / per_second,
        sequence=rates.decode_sequence_us * 1e-6,
        kv=engine.kv_per_token / bytes_per_second,
    )


def response_lengths(mean: float, most: int, count: int) -> np.ndarray:
    """Return ``count`` lengths in ascending order, the quantiles of a log-normal distribution that
    is cut off at ``most`` and then has this ``mean``; all are ``most`` if the mean is.
    """
    if mean >= most:
        return np.full(count, float(most))
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((number + 0.5) / count) for number in range(count)])
    low, high = math.log(mean) - 2.0, math.log(most) + 20.0
    for _ in range(60):
        location = (low + high) / 2
        lengths = np.clip(np.exp(location + SPREAD * scores), 1.0, most)
        if lengths.mean() < mean:
            low = location
        else:
            high = location
    return np.ceil(lengths)


@dataclass(frozen=True)
class DecodingSteps:
    """The decoding steps of a rollout, in stretches: ``count`` steps in which as many sequences are
    ``running``, of so many tokens of ``context`` in the mean. ``prompts`` are read before, of
    ``prompt`` tokens each.
    """

    count: np.ndarray
    running: np.ndarray
    context: np.ndarray
    prompts: float
    prompt: int

    def seconds(self, costs: DecodingCosts) -> float:
        """Return how long they take."""
        decoding = self.count @ costs.seconds(self.running, self.context)
        return float(decoding) + self.prompts * self.prompt * costs.arithmetic


def rollout_steps(config: Config, engine: EngineMemory, work: Work) -> DecodingSteps:
    """Return the decoding steps of the slowest engine of a rollout, the one with the longest
    response.
    """
    most = config.rollout.max_response_length
    mean = work.response_length
    prompt = work.length - mean
    responses = max(1, engine.responses)
    lengths = response_lengths(mean, most, responses)
    everywhere = max(responses, work.tokens // work.length)
    lengths[-1] = response_lengths(mean, most, everywhere)[-1]
    return decoding_steps(
        lengths=np.random.default_rng(0).permutation(lengths),
        prompt=prompt,
        prompts=responses / config.rollout.group_size,  # a group's responses share theirs
        most_sequences=config.rollout.max_num_seqs,
        # an engine that is not planned has room for all
        cached_tokens=engine.cached_tokens or responses * (prompt + most),
    )


def decoding_steps(
    lengths: np.ndarray, prompt: int, prompts: float, most_sequences: int, cached_tokens: int
) -> DecodingSteps:
    """Return the steps in which an engine decodes responses of these ``lengths``, with at most so
    many sequences at once and so many tokens in its cache. Sequences begin in their order, as soon
    as there is room; if the cache overflows, the latest gives way, and goes on later from where it
    was.
    """
    done = np.zeros(len(lengths))
    running = np.zeros(len(lengths), bool)
    ended = np.zeros(len(lengths), bool)
    stretches: list[tuple[float, float, float]] = []
    while not ended.all():
        context = prompt + done
        _give_way(running, context, cached_tokens)
        _admit(running, ended, context, most_sequences, cached_tokens)
        steps = max(1.0, min(_TOKENS, float((lengths - done)[running].min())))
        mean_context = float(context[running].mean()) + steps / 2
        stretches.append((steps, float(running.sum()), mean_context))
        done[running] += steps
        ended |= running & (done >= lengths)
        running &= ~ended
    count, at_once, contexts = np.array(stretches).T
    return DecodingSteps(
        count=count, running=at_once, context=contexts, prompts=prompts, prompt=prompt
    )


def _give_way(running: np.ndarray, context: np.ndarray, cached_tokens: int) -> None:
    """Take the latest sequences out of ``running`` for which the cache has no room."""
    while running.sum() > 1 and (context[running] + _TOKENS).sum() > cached_tokens:
        running[np.flatnonzero(running)[-1]] = False


def _admit(
    running: np.ndarray,
    ended: np.ndarray,
    context: np.ndarray,
    most_sequences: int,
    cached_tokens: int,
) -> None:
    """Let waiting sequences run while there is room; at least one runs."""
    held = float((context[running] + _TOKENS).sum())
    for index in np.flatnonzero(~running & ~ended):
        held += context[index] + _TOKENS
        if running.any() and (running.sum() >= most_sequences or held > cached_tokens):
            return
        running[index] = True
