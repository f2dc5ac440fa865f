"""Rolling out and judging. Every rank samples and judges its share of the prompts; all ranks end up with everything."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives.expected_digits import DigitScores
from megatron_dcpo.rollout import EngineError, SamplingConfig
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.timers import Timers
from megatron_dcpo.training.run import TrainingRun
from megatron_dcpo.training.weight_sync import MAX_RESTARTS, recover_engines
from megatron_dcpo.types import Judgement, Prompt, Response, TokenAdvantages

Judged = tuple[Response, Judgement]

# One thread for as long as the process lives: sandboxes that die with their parent die with the thread that began them.
_JUDGE = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")


@dataclass(frozen=True)
class TrainingSample:
    """One response on its way from sampling to loss. Each stage returns a copy with its own fields filled.

    By the policy (``update.py``): ``old_logprobs`` and ``ref_logprobs``, float32 [T]. By the objective: the rewards ``R``
    and ``R_c``, ``tokens`` (advantage and block of each token), ``weights`` float64 [T] (each token's share of the
    loss), and ``digits``, the positions trained on all digits at once.
    """

    prompt: Prompt
    response: Response
    judgement: Judgement
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    R: float = math.nan
    R_c: float = math.nan
    tokens: TokenAdvantages | None = None
    weights: np.ndarray | None = None
    digits: tuple[DigitScores, ...] = ()

    @property
    def prompt_ids(self) -> np.ndarray:
        return np.asarray(self.prompt.token_ids, np.int64)

    @property
    def response_ids(self) -> np.ndarray:
        return self.response.token_ids


def roll_out(run: TrainingRun, prompts: Sequence[Prompt], step: int, timers: Timers) -> list[Future[list[Judged]]]:
    """G responses to each prompt of this rank's share, sampled by its engine and on their way through the judge.

    The rollout comes in chunks (``rollout.chunks``). A chunk is judged, in a thread that waits for worker processes,
    while the next one is generated: ``time/judge`` is what is left to wait for, ``time/judge_busy`` how long it took.
    A signal cuts the rollout short, which ``stop_if_asked`` then finds out together with the other ranks. An engine that
    fails is started anew, gets the weights again, and generates what is left. Collective.
    """
    config = run.config.rollout
    sampling = SamplingConfig(
        n=config.group_size,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_response_length,
        seed=run.config.seed,
    )
    size = run.engine.tensor_model_parallel_size  # ranks of an engine: neighbours, which sample the same
    engine, engines = run.topology.rank // size, run.topology.world_size // size
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    pending: list[Future[list[Judged]]] = []
    waiting = _chunks(prompts[engine::engines], number_of_chunks(run.config, -(-len(prompts) // engines)))
    for restarts in range(MAX_RESTARTS + 1):
        failure = ""
        try:
            while waiting:
                responses = run.engine.generate(waiting[0], sampling, step)[run.topology.rank % size :: size]
                waiting.pop(0)
                pending.append(_JUDGE.submit(_judge_chunk, run, responses, by_id, timers, step - 1))
                if pending[0].done():
                    pending[0].result()  # a judge that cannot work at all ends the run now, not after the last chunk
        except RolloutAbandoned:
            waiting = []
        except EngineError as error:
            failure = str(error)
        if not recover_engines(run, failure, version=step - 1, restarts=restarts):
            break
    return pending


def gather_judged(
    run: TrainingRun, prompts: Sequence[Prompt], pending: Sequence[Future[list[Judged]]]
) -> list[TrainingSample]:
    """Wait for the judge and gather all ranks' responses (collective): by prompt in step order, equal on every rank.

    Raises :class:`UserError` when a response was sampled by other weights than the policy's.
    """
    judged = [pair for future in pending for pair in future.result()]
    everything = {
        (response.prompt_id, response.sample_index): (response, judgement)
        for part in all_gather_objects(judged)
        for response, judgement in part
    }
    return [
        TrainingSample(prompt, *everything[prompt.prompt_id, index])
        for prompt in prompts
        for index in range(run.config.rollout.group_size)
    ]


def number_of_chunks(config: Config, prompts_per_rank: int) -> int:
    """The same on all ranks, whatever their share is: an engine may be a collective of its own.

    A chunk is never more than the engine takes at once. Programs take long to judge, so that theirs is generated in
    four chunks unless ``rollout.chunks`` says otherwise; splitting a rollout costs some of the engine's throughput.
    """
    at_once = max(1, config.rollout.max_num_seqs // config.rollout.group_size)
    wanted = config.rollout.chunks or (4 if config.judging.verifier == "code" else 1)
    return max(-(-prompts_per_rank // at_once), min(wanted, prompts_per_rank))


def _chunks(prompts: Sequence[Prompt], number: int) -> list[Sequence[Prompt]]:
    """Prompts of similar length together; the responses do not depend on their company."""
    ordered = sorted(prompts, key=lambda prompt: len(prompt.token_ids))
    size = -(-len(ordered) // number)
    return [ordered[index * size : (index + 1) * size] for index in range(number)]


def _judge_chunk(
    run: TrainingRun, responses: Sequence[Response], by_id: Mapping[str, Prompt], timers: Timers, version: int
) -> list[Judged]:
    """Raises :class:`UserError` when a response was sampled by other weights than the policy's, ``version``."""
    for response in responses:
        if response.weights_version != version:
            raise UserError(
                f"response to {response.prompt_id} was sampled by weights version {response.weights_version}, "
                f"the policy is at {version}: the engine was not synchronised"
            )
    start = time.perf_counter()
    judgements = run.judge(responses, by_id)
    timers.add("judge_busy", time.perf_counter() - start)
    return list(zip(responses, judgements, strict=True))
