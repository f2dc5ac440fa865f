"""The golden group and small helpers shared by the tests of the objectives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_dcpo.objectives import Objective, ObjectiveConfig, Scored, TokenBatch, build_objective
from megatron_dcpo.types import Judgement
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


def objective(**options: Any) -> Objective:
    return build_objective(ObjectiveConfig(**options))


def golden_judgements(prompt_id: str = "p0") -> list[Judgement]:
    """The golden group as the splitter hands it over: without a marker the EOS is the confidence block."""
    judgements = []
    for i, status in enumerate(INPUTS["status"]):
        status = {"range": "out_of_range"}.get(status, status)
        length = INPUTS["n_reason"][i] + INPUTS["n_conf"][i]
        boundary = length - 1 if status == "missing" else INPUTS["n_reason"][i]
        c, ok = INPUTS["conf"][i], status == "ok"
        judgements.append(
            Judgement(prompt_id, INPUTS["correct"][i], c if ok else None, status, boundary, length, None if ok else c)
        )
    return judgements


def judgement(
    prompt_id: str, correct: float, confidence: float | None, boundary: int = 3, length: int = 5, status: str = ""
) -> Judgement:
    kind: Any = status or ("missing" if confidence is None else "ok")
    return Judgement(prompt_id, correct, confidence, kind, boundary, length)


def flat(rows: Sequence[Any], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.concatenate([np.asarray(row) for row in rows])).to(dtype)


def token_batch(
    scored: Scored,
    weights: Sequence[np.ndarray],
    old: Sequence[np.ndarray] = OLD,
    new: Sequence[np.ndarray] = NEW,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> TokenBatch:
    """All responses of ``scored`` in one micro-batch; ``logprobs`` is a leaf that takes the gradient."""
    return TokenBatch(
        logprobs=flat(new, dtype).requires_grad_(),
        old_logprobs=flat(old, dtype),
        advantages=flat([tokens.advantages for tokens in scored.tokens], dtype),
        block_ids=flat([tokens.block_ids for tokens in scored.tokens], torch.int64),
        weights=flat(weights, dtype),
        sequence_ids=flat([np.full(len(row), i) for i, row in enumerate(new)], torch.int64),
        correct=torch.tensor([j.correct for j in scored.judgements], dtype=dtype),
        **more,
    )


def loss_and_gradient(
    chosen: Objective,
    judgements: Sequence[Judgement] | None = None,
    old: Sequence[np.ndarray] = OLD,
    new: Sequence[np.ndarray] = NEW,
    dtype: torch.dtype = torch.float64,
    scored: Scored | None = None,
    **more: Any,
) -> tuple[float, list[np.ndarray]]:
    """Loss of everything at once, and its gradient per token of each response."""
    scored = scored or chosen.score(judgements or golden_judgements(), old)
    weights = chosen.token_weights(scored, chosen.counts(scored))
    batch = token_batch(scored, weights, old, new, dtype, **more)
    losses, _ = chosen.token_loss(batch)
    total = losses.sum()
    total.backward()
    gradient = batch.logprobs.grad
    assert gradient is not None
    return float(total.detach()), np.split(gradient.numpy(), np.cumsum([len(row) for row in new])[:-1])


def with_tokens(scored: Scored, advantages: Sequence[np.ndarray], blocks: Sequence[np.ndarray] | None = None) -> Scored:
    """``scored`` with other token advantages (and blocks): how the negative controls build a defect."""
    tokens = [
        dataclasses.replace(t, advantages=advantages[i], block_ids=t.block_ids if blocks is None else blocks[i])
        for i, t in enumerate(scored.tokens)
    ]
    return dataclasses.replace(scored, tokens=tuple(tokens))


def select(scored: Scored, indices: Any) -> Scored:
    """The responses ``indices``, in that order: a micro-batch, or one rank's share."""
    columns = {field.name: getattr(scored, field.name) for field in dataclasses.fields(scored)}
    rows = [int(index) for index in indices]
    return Scored(
        **{k: v[rows] if isinstance(v, np.ndarray) else tuple(v[i] for i in rows) for k, v in columns.items()}
    )
