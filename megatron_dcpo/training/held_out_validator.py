"""Validation while training: held-out problems, sampled by the run's engines with the weights of a
step.

The run stays as it is, bit for bit: random numbers are counted, an engine forgets the prompts,
nothing is trained. A validator returns its results; the loop records them and acts on them.
"""

from __future__ import annotations

from functools import partial

from megatron_dcpo.config import Config
from megatron_dcpo.evaluation.held_out import HeldOut
from megatron_dcpo.evaluation.samples import write_samples
from megatron_dcpo.judging.verdicts import check_unjudged
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.generation import Generation
from megatron_dcpo.training.validation import Validation
from megatron_dcpo.types import Response, ResponseKey


class HeldOutValidator:
    """Measures the policy on the ``held_out`` problems. All methods are collective."""

    def __init__(
        self, held_out: HeldOut, generation: Generation, timers: Timers, config: Config
    ) -> None:
        options = config.evaluation
        self.held_out = held_out
        self.generation = generation
        self.timers = timers
        self.max_error_rate = config.judging.max_error_rate
        self.interval = options.interval
        self.last_step = config.training.steps
        self.sampling = SamplingConfig(
            n=options.samples,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            max_tokens=options.max_tokens or config.rollout.max_response_length,
        )

    def is_due(self, step: int) -> bool:
        """Return whether the policy after ``step`` is to be validated."""
        return step % self.interval == 0 or step == self.last_step

    def validate(self) -> Validation | None:
        """Return what the policy reaches whose weights the engines have; None when a signal cut the
        validation short. Raises :class:`EngineError` on all ranks if an engine failed, and
        :class:`TooManyUnjudged` if too many responses have no judgement.
        """
        collectives = self.generation.collectives
        engine = self.generation.engine
        with self.timers("evaluation"):
            responses = self._generate()
            if collectives.max(signals.stop_requested() or 0):
                return None
            kept = [response for response in responses if response.failure is None]
            judged = self.held_out.judged(kept, engine.eos_token_ids)
            samples = [sample for ranked in collectives.gather(judged) for sample in ranked]
            sampled = sum(collectives.gather(len(responses)))
            unjudged = sampled - len(samples)
            check_unjudged(unjudged, sampled, self.max_error_rate, "a validation")
            metrics = collectives.broadcast(self.held_out.metrics(samples))
        return Validation(metrics=metrics, write=partial(write_samples, samples))

    def _generate(self) -> list[Response]:
        """Return this rank's share of the responses."""
        share = self.generation.share
        prompts = list(self.held_out.prompts.values())[share.engine :: share.engines]
        samples = [(prompt, index) for prompt in prompts for index in range(self.sampling.n)]
        responses: dict[ResponseKey, Response] = {}
        for together in self.generation.stream(samples, self.sampling, step=0):
            responses.update({response.key: response for response in together})
        self.generation.engine.forget_prompts()
        mine = samples[share.rank_in_engine :: share.ranks]
        keys = [(prompt.prompt_id, index) for prompt, index in mine]
        return [responses[key] for key in keys if key in responses]
