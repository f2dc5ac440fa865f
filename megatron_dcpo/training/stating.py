"""The confidences of a rollout where an adapter states them (``objective.confidence_parameters: adapter``).

Nothing of them is sampled: behind every response's reasoning the adapter's distribution over the values is known while the
policy is trained, and its expected score is the loss. What it would state is put into the step's judgements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from megatron_dcpo.judging.statement import StatementForm, reasoning_features, reasoning_length
from megatron_dcpo.objectives import Objective, Scored
from megatron_dcpo.objectives.stated import StatementTarget, score_values, stated, statement_losses
from megatron_dcpo.policy.batching import MicroBatch
from megatron_dcpo.policy.statements import StatementInputs
from megatron_dcpo.training.run import TrainingRun
from megatron_dcpo.training.sampling import Sample, TrainingSample
from megatron_dcpo.types import replaced


def statement_targets(
    run: TrainingRun, samples: Sequence[TrainingSample], scored: Scored
) -> list[StatementTarget | None]:
    """What the statement of each sample is trained on; None where the policy itself states the confidence."""
    if not run.objective.adapter_states or run.statement_form is None:
        return [None] * len(samples)
    options = run.objective.options
    weight = options.weight_confidence / max(float(scored.trained.sum()), 1.0)
    scores = score_values(scored.targets, options, run.statement_form.values)
    targets: list[StatementTarget | None] = []
    for sample, row, trained in zip(samples, scores, scored.trained, strict=True):
        ids, boundary = sample.response_ids, sample.judgement.boundary
        length = reasoning_length(ids, len(ids) if boundary is None else boundary, run.digits.piece, run.digits.eos_ids)
        seen = None
        if options.confidence_sees == "logprobs":
            seen = reasoning_features(sample.response.logprobs[:length])
        targets.append(StatementTarget(len(sample.prompt_ids) + length, row, weight * float(trained), seen))
    return targets


def statement_inputs(form: StatementForm | None, samples: Sequence[TrainingSample]) -> StatementInputs | None:
    """The statements of a micro-batch."""
    if form is None:
        return None
    targets = [sample.statement for sample in samples if sample.statement is not None]
    seen = [target.seen for target in targets if target.seen is not None]
    return StatementInputs(
        form,
        [target.after for target in targets],
        np.array([target.scores for target in targets]).reshape(len(targets), form.values),
        np.array([target.weight for target in targets]),
        np.stack(seen) if seen else None,
    )


def statement_loss(objective: Objective, batch: MicroBatch, logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Of a micro-batch: the sum of the weighted losses, and what was stated, by sample."""
    statements = batch.statements
    assert statements is not None
    losses = statement_losses(logits, statements.scores, objective.options)
    values = stated(logits)[: statements.count].tolist()
    names = [(sample.response.prompt_id, sample.response.sample_index) for sample in batch.samples]
    return (losses * statements.weights).sum(), {"stated": dict(zip(names, values, strict=True))}


def with_confidences(samples: Sequence[TrainingSample], stated: Mapping[Sample, float]) -> list[TrainingSample]:
    """The samples with what the adapter stated as their confidence."""

    def filled(sample: TrainingSample) -> TrainingSample:
        c = stated.get((sample.response.prompt_id, sample.response.sample_index))
        if c is None:
            return sample
        judgement = replaced(sample.judgement, confidence=c, status="ok")
        R_c = sample.statement.scores[round(100 * c)] if sample.statement is not None else sample.R_c
        return replaced(sample, judgement=judgement, R_c=float(R_c))

    return [filled(sample) for sample in samples]
