"""Rolling out and judging. Every rank samples and judges its share of the prompts; all ranks end up with everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import SamplingConfig
from megatron_dcpo.runtime.distributed import all_gather_objects
from megatron_dcpo.signals import RolloutAbandoned
from megatron_dcpo.training.setup import Run
from megatron_dcpo.types import Judgement, Prompt, Response


@dataclass(frozen=True)
class Rollout:
    """One step's responses with their judgements, index by index, and the prompts by id. Equal on all ranks."""

    prompts: dict[str, Prompt]
    responses: list[Response]
    judgements: list[Judgement]

    def subset(self, prompt_ids: set[str]) -> Rollout:
        """The groups of ``prompt_ids``."""
        kept = [i for i, response in enumerate(self.responses) if response.prompt_id in prompt_ids]
        return Rollout(
            {prompt_id: self.prompts[prompt_id] for prompt_id in sorted(prompt_ids)},
            [self.responses[i] for i in kept],
            [self.judgements[i] for i in kept],
        )


def roll_out(run: Run, prompts: Sequence[Prompt], step: int) -> list[Response]:
    """G responses to each prompt of this rank's share, sampled by this rank's engine; none when a signal cut it short,
    which ``stop_if_asked`` then finds out together with the other ranks."""
    config = run.config.rollout
    sampling = SamplingConfig(
        n=config.group_size,
        temperature=config.temperature,
        max_tokens=config.max_response_length,
        seed=run.config.seed,
    )
    share = prompts[run.topology.rank :: run.topology.world_size]
    try:
        return run.engine.generate(share, sampling, step)
    except RolloutAbandoned:
        return []


def judge_rollout(run: Run, prompts: Sequence[Prompt], responses: Sequence[Response]) -> Rollout:
    """Judge this rank's responses and gather all ranks' (collective). Prompts come in step order on every rank.

    Raises :class:`UserError` when a response was sampled by other weights than the policy's.
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    for response in responses:
        if response.weights_version != run.engine.weights_version:
            raise UserError(
                f"response to {response.prompt_id} was sampled by weights version {response.weights_version}, "
                f"the policy is at {run.engine.weights_version}: the engine was not synchronised"
            )
    judged = list(zip(responses, run.judge(responses, by_id), strict=True))
    everything = {
        (response.prompt_id, response.sample_index): (response, judgement)
        for part in all_gather_objects(judged)
        for response, judgement in part
    }
    ordered = [everything[p.prompt_id, i] for p in prompts for i in range(run.config.rollout.group_size)]
    return Rollout(by_id, [response for response, _ in ordered], [judgement for _, judgement in ordered])
