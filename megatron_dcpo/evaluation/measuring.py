"""Measure a judged response: all kinds of confidence but the stated one, and the inputs of post-hoc
predictors.
"""

from __future__ import annotations

import numpy as np

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
    logprobs = [float(value) for value in response.sampled(response.logprobs)]
    tops = response.top_logprobs
    if tops is not None:
        tops = response.sampled(tops)
    reasoning_logprob = None
    if judgement.boundary is not None:
        is_reasoning = np.arange(len(response.logprobs)) < judgement.boundary
        reasoning = logprobs[: int(response.sampled(is_reasoning).sum())]
        reasoning_logprob = min(0.0, sum(reasoning))
    measures = Measures(
        token_confidence=geometric_mean_probability(logprobs),
        min_logprob=min(logprobs, default=None),
        mean_entropy=mean_entropy(tops),
        reasoning_logprob=reasoning_logprob,
        features=features(tops) if keep_features else None,
    )
    return Sample(
        prompt=codec.as_read(prompt),
        response=codec.as_read(response),
        judgement=judgement,
        measures=measures,
    )
