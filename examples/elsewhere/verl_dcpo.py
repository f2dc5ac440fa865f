"""DCPO in verl: an advantage estimator with an advantage for each block of a response (verl 0.9).

    # in a file that the trainer imports (actor_rollout_ref.model.external_lib=my_setup)
    import verl_dcpo; verl_dcpo.install("/models/Qwen3-8B")

    algorithm.adv_estimator=gdpo

verl hands the sampled ids and the columns of the data to the estimator ``gdpo`` alone
(``compute_advantage`` in ``verl/trainer/ppo/ray_trainer.py``), so ours takes that name. The right
answers are ``reward_model.ground_truth``, as verl's data sets have them; the reward is only logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dcpo
import numpy as np
import torch
from transformers import AutoTokenizer
from verl.trainer.ppo import core_algos

from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.objectives.method import Method


class Estimator:
    """verl's signature of an advantage estimator, for one tokenizer and one method."""

    def __init__(self, tokens: TokenBytes, eos_ids: set[int], objective: Method) -> None:
        self.tokens = tokens
        self.eos_ids = eos_ids
        self.objective = objective

    def __call__(
        self,
        response_mask: torch.Tensor,
        index: np.ndarray,
        batch: Mapping[str, torch.Tensor],
        non_tensor_batch: Mapping[str, np.ndarray],
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns [B, T] of responses whose prompts ``index`` names."""
        ids, mask = batch["responses"], response_mask.bool()
        completions = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        scored = dcpo.score(
            completions,
            answers=[str(model["ground_truth"]) for model in non_tensor_batch["reward_model"]],
            groups=[str(uid) for uid in index],
            tokens=self.tokens,
            eos_ids=self.eos_ids,
            objective=self.objective,
        )
        padded = dcpo.padded(scored.advantages, ids.shape[1])
        advantages = torch.tensor(padded, dtype=torch.float32, device=ids.device)
        return advantages, advantages


def install(model: str, **options: Any) -> Estimator:
    """Register the estimator for the tokenizer of ``model``; ``options`` are DCPO's, as
    ``lam=1``.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    estimator = Estimator(token_bytes(tokenizer), {tokenizer.eos_token_id}, dcpo.method(**options))
    core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"] = estimator
    return estimator
