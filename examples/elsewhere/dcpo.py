"""DCPO's two advantages for a trainer of somebody else's: what the other files here share.

A batch of sampled token ids is judged (correctness, stated confidence, where the two blocks meet),
and every token gets the advantage of its block: correctness on the reasoning, calibration on the
confidence. NumPy only; ``pip install .`` is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from megatron_dcpo.calibration import auroc, brier, ece, parse_rate
from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.judging.math.pool import verify_answers
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.objectives import build_method
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample


class Scored(NamedTuple):
    """``advantages`` float64 [T] of every completion, and what it is worth."""

    advantages: list[np.ndarray]
    judgements: list[Judgement]


def method(name: str = "dcpo", **options: object) -> Method:
    """Return a method of this package, ``method(lam=1)`` for instance, or ``method("rlcr")``."""
    return build_method(ObjectiveConfig.model_validate({"name": name, **options}))


def score(
    completions: Sequence[Sequence[int]],
    answers: Sequence[str],
    groups: Sequence[str],
    tokens: TokenBytes,
    eos_ids: Collection[int],
    objective: Method,
) -> Scored:
    """Judge ``completions``, sampled token ids without padding, against the right ``answers``, and
    score those of a prompt, which have the same name in ``groups``, against one another.

    Raises ``UserError`` for a group of one.
    """
    prompts = {}
    responses = []
    for index, (ids, answer, group) in enumerate(zip(completions, answers, groups, strict=True)):
        prompts[group] = Prompt(
            prompt_id=group, messages=(), token_ids=(), ground_truth=answer, task="elsewhere"
        )
        ended = len(ids) > 0 and ids[-1] in eos_ids
        responses.append(
            Response(
                prompt_id=group,
                sample_index=index,
                token_ids=np.asarray(ids, np.int64),
                logprobs=np.zeros(len(ids), np.float32),
                finish_reason="stop" if ended else "length",
                weights_version=0,
            )
        )
    judgements = judge_many(
        responses, prompts, tokens=tokens, eos_ids=eos_ids, verifier=verify_answers
    )
    samples = [
        TrainingSample(prompts[response.prompt_id], response, judgement)
        for response, judgement in zip(responses, judgements, strict=True)
    ]
    advantages = []
    for sample in objective.score(samples):
        assert sample.advantages is not None
        advantages.append(sample.advantages)
    return Scored(advantages, judgements)


def metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return accuracy and calibration of a batch, under the names that ``dcpo train`` logs."""
    correct = [judgement.correct for judgement in judgements]
    confidences = [judgement.confidence for judgement in judgements]
    return {
        "reward/accuracy": float(np.mean(correct)),
        "calibration/ece": ece(confidences, correct),
        "calibration/brier": brier(confidences, correct),
        "calibration/auroc": auroc(confidences, correct),
        "format/violation_rate": 1.0 - parse_rate(confidences),
    }


def padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Return per-token rows as one array [N, width], 0 behind the end of a row."""
    whole = np.zeros((len(rows), width))
    for index, row in enumerate(rows):
        whole[index, : len(row)] = row
    return whole
