"""Measure a judged response: all kinds of confidence but the stated one, and the inputs of post-hoc
predictors.
"""

from __future__ import annotations

from megatron_dcpo import codec
from megatron_dcpo.evaluation.posthoc_predictors import features
from megatron_dcpo.evaluation.samples import (
    Measures,
    Sample,
    geometric_mean_probability,
    mean_entropy,
)
from megatron_dcpo.types import Judgement, Prompt, Response


def measured_sample(
    prompt: Prompt, response: Response, judgement: Judgement, keep_features: bool
) -> Sample:
    """Return a judged response with its measures, without its tokens."""
    logprobs = [float(value) for value in response.logprobs]
    reasoning_logprob = None
    if judgement.boundary is not None:
        reasoning_logprob = min(0.0, sum(logprobs[: judgement.boundary]))
    measures = Measures(
        token_confidence=geometric_mean_probability(logprobs),
        min_logprob=min(logprobs, default=None),
        mean_entropy=mean_entropy(response.top_logprobs),
        reasoning_logprob=reasoning_logprob,
        features=features(response.top_logprobs) if keep_features else None,
    )
    return Sample(
        prompt=codec.as_read(prompt),
        response=codec.as_read(response),
        judgement=judgement,
        measures=measures,
    )
