"""The golden group and small helpers shared by the tests of the objectives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_dcpo.objectives import Method, ObjectiveConfig, build_method
from megatron_dcpo.objectives.worksheet import loss_batch
from megatron_dcpo.types import (
    Judgement,
    MicroBatch,
    Prompt,
    Response,
    TokenOutputs,
    TrainingSample,
)
from tests.helpers.paths import FIXTURES

GOLDEN = json.loads((FIXTURES / "golden_group.json").read_text())
INPUTS, EXPECTED = GOLDEN["inputs"], GOLDEN["expected"]
OLD = [np.array(row) for row in INPUTS["old"]]
NEW = [np.array(row) for row in INPUTS["new"]]

# golden name -> options of `dcpo objective`
GOLDEN_OPTIONS: dict[str, dict[str, Any]] = {
    "dcpo lam=0.0 [paper]": {"lam": 0.0},
    "dcpo lam=0.5 [paper]": {},
    "dcpo lam=1.0 [paper]": {"lam": 1.0},
    "dcpo lam=0.0 [verl]": {"lam": 0.0, "preset": "verl_compat"},
    "dcpo lam=0.5 [verl]": {"preset": "verl_compat"},
    "dcpo lam=1.0 [verl]": {"lam": 1.0, "preset": "verl_compat"},
    "dcpo lam=0.5 [paper, fallback=none]": {"fallback": "none"},
    "dcpo lam=0.5 [paper, fallback=last2]": {"fallback": "last_two"},
    "dcpo lam=0.5 [paper, token-mean]": {"loss_aggregation": "token_mean"},
    "dcpo lam=0.5 [paper, dual clip]": {"dual_clip": 3.0},
    "coupled lam=0.5 [paper]": {"name": "coupled"},
    "coupled lam=0.5 [verl]": {"name": "coupled", "preset": "verl_compat"},
    "grpo [paper]": {"name": "grpo"},
    "grpo [verl]": {"name": "grpo", "preset": "verl_compat"},
    "rlcr [paper]": {"name": "rlcr"},
    "rlcr [original code]": {"name": "rlcr", "variant": "original"},
    "ccgspg beta=0.01": {"name": "ccgspg", "beta": 0.01},
}
# of other trainers: options, and the loss by the paper's formula
# (tests/unit/objectives/test_losses.py)
_DR_GRPO: dict[str, Any] = {"loss_aggregation": "constant", "max_response_length": 16}
OTHER_LOSSES: dict[str, tuple[dict[str, Any], float]] = {
    "grpo gspo": ({"name": "grpo", "ratio": "sequence"}, 0.01917630094064825),
    "dcpo gspo": ({"ratio": "sequence"}, -0.047997846436940605),
    "grpo cispo": ({"name": "grpo", "clip": "cispo"}, 0.0051963907195979805),
    "dcpo cispo": ({"clip": "cispo"}, 0.020761834022672412),
    "grpo dr_grpo": ({"name": "grpo", **_DR_GRPO}, 0.010446712335441083),
    "dcpo dr_grpo": (_DR_GRPO, 0.001697086626764429),
}
# of which the losses are compared with and without what has no gradient
LEFT_OUT = ("grpo [paper]", "dcpo lam=0.5 [paper]", "dcpo lam=0.5 [paper, token-mean]", "grpo gspo")


def objective(**options: Any) -> Method:
    return build_method(ObjectiveConfig(**options))


@dataclass(frozen=True)
class Scored:
    """A mini-batch with its group scores, float64 [N] each, and what a method made of its
    samples.
    """

    targets: np.ndarray
    R: np.ndarray
    R_c: np.ndarray
    A_r: np.ndarray
    A_c: np.ndarray
    samples: tuple[TrainingSample, ...]

    @property
    def weights(self) -> list[np.ndarray]:
        return [s.weights for s in self.samples if s.weights is not None]


def score(
    chosen: Method, judgements: Sequence[Judgement], old: Sequence[np.ndarray] | None = None
) -> Scored:
    samples = samples_of(judgements, old)
    scores = chosen.scaled_scores(samples, chosen.group_scores(samples))
    return Scored(*scores, tuple(chosen.score(samples)))


def samples_of(
    judgements: Sequence[Judgement], old: Sequence[np.ndarray] | None = None
) -> list[TrainingSample]:
    samples = []
    for i, j in enumerate(judgements):
        response = Response(
            j.prompt_id, i, np.zeros(j.length, np.int64), np.zeros(j.length, np.float32), "stop", 0
        )
        prompt = Prompt(j.prompt_id, (), (1,), "", "")
        samples.append(
            TrainingSample(prompt, response, j, old_logprobs=None if old is None else old[i])
        )
    return samples


def golden_judgements(prompt_id: str = "p0") -> list[Judgement]:
    """The golden group as the splitter hands it over: without a marker the EOS is the confidence
    block.
    """
    judgements = []
    for i, status in enumerate(INPUTS["status"]):
        status = {"range": "out_of_range"}.get(status, status)
        length = INPUTS["n_reason"][i] + INPUTS["n_conf"][i]
        boundary = length - 1 if status == "missing" else INPUTS["n_reason"][i]
        c, ok = INPUTS["conf"][i], status == "ok"
        judgements.append(
            Judgement(
                prompt_id,
                INPUTS["correct"][i],
                c if ok else None,
                status,
                boundary,
                length,
                None if ok else c,
            )
        )
    return judgements


def judgement(
    prompt_id: str,
    correct: float,
    confidence: float | None,
    boundary: int = 3,
    length: int = 5,
    status: str = "",
) -> Judgement:
    kind: Any = status or ("missing" if confidence is None else "ok")
    return Judgement(prompt_id, correct, confidence, kind, boundary, length)


def flat(rows: Sequence[Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.concatenate([np.asarray(row) for row in rows])).to(dtype)


def token_batch(
    samples: Sequence[TrainingSample],
    old: Sequence[np.ndarray] = OLD,
    new: Sequence[np.ndarray] = NEW,
    dtype: torch.dtype = torch.float64,
    entropy: torch.Tensor | None = None,
    **more: torch.Tensor,
) -> tuple[MicroBatch, TokenOutputs]:
    """All scored ``samples`` in one micro-batch; the outputs' ``logprobs`` is a leaf that takes the
    gradient.
    """
    batch = loss_batch(samples, {"old_logprobs": flat(old), **more})
    columns = {
        name: column.to(dtype) if name != "block_ids" else column
        for name, column in batch.columns.items()
    }
    logprobs = flat(new, dtype).requires_grad_()
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs) if entropy is None else entropy)
    return dataclasses.replace(batch, columns=columns, R=batch.R.to(dtype)), outputs


def loss_and_gradient(
    chosen: Method,
    judgements: Sequence[Judgement] | None = None,
    old: Sequence[np.ndarray] = OLD,
    new: Sequence[np.ndarray] = NEW,
    dtype: torch.dtype = torch.float64,
    samples: Sequence[TrainingSample] | None = None,
    **more: Any,
) -> tuple[float, list[np.ndarray]]:
    """Loss of everything at once, and its gradient per token of each response."""
    if samples is None:
        samples = chosen.score(samples_of(judgements or golden_judgements(), old))
    batch, outputs = token_batch(samples, old, new, dtype, **more)
    losses, _ = chosen.loss(batch, outputs)
    total = losses.sum()
    total.backward()
    gradient = outputs.logprobs.grad
    assert gradient is not None
    return float(total.detach()), np.split(
        gradient.numpy(), np.cumsum([len(row) for row in new])[:-1]
    )


def with_tokens(
    scored: Scored, advantages: Sequence[np.ndarray], blocks: Sequence[np.ndarray] | None = None
) -> list[TrainingSample]:
    """The samples with other token advantages (and blocks): how the negative controls build a
    defect.
    """
    return [
        dataclasses.replace(
            s, advantages=advantages[i], block_ids=s.block_ids if blocks is None else blocks[i]
        )
        for i, s in enumerate(scored.samples)
    ]
