"""A method: how a group of responses is scored, and the loss of a token.

    scores = method.group_scores(samples)  # once per group: rewards and advantages
    samples = method.score(samples, scores)  # per mini-batch: blocks and weights of every token
    contributions, statistics = method.loss(batch, outputs)  # per token of a micro-batch

The plain sum of all contributions is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.objectives.advantages import (
    REWARD_TOLERANCE,
    batch_scale,
    block_ids,
    has_signal,
    scored_confidence,
)
from megatron_dcpo.objectives.options import CLIPPED_LOSS, COMMON, ObjectiveConfig
from megatron_dcpo.objectives.policy_loss import Stats, clipped_policy_loss
from megatron_dcpo.objectives.shaping import with_length_penalty
from megatron_dcpo.runtime.plugins import is_import_path, raised
from megatron_dcpo.types import (
    BLOCK_CONFIDENCE,
    BLOCK_NONE,
    BLOCK_REASONING,
    BLOCKS,
    ConfidenceStatus,
    Judgement,
    MicroBatch,
    Response,
    TokenOutputs,
    TrainingSample,
    replaced,
)

if TYPE_CHECKING:
    from torch import Tensor

SCORES = ("target", "R", "R_c", "A_r", "A_c")
A_C = SCORES.index("A_c")
BLOCK_ORDER = tuple(BLOCKS.values())

# From a group's correctness R, confidence c (NaN if malformed) and mean log-prob, float64 [G] each,
# and the options to ``SCORES``, float64 [G] each: the target of the confidence, the reward behind
# A_r, the calibration reward (NaN if the method has none), and the advantages of the reasoning and
# of the confidence tokens.
ScoreGroup = Callable[[np.ndarray, np.ndarray, np.ndarray, ObjectiveConfig], Sequence[np.ndarray]]
TokenLoss = Callable[[MicroBatch, TokenOutputs, ObjectiveConfig], "tuple[Tensor, Stats]"]


def no_defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Leave every option to the preset."""
    return {}


@dataclass(frozen=True)
class Method:
    """What a file of this package (or a user's) declares; ``objectives.build_method`` adds the
    ``options``. It holds no state.

    score_group: see :data:`ScoreGroup`.
    token_loss: returns the contributions [n] of a micro-batch's tokens, and sums over them.
    reads: the names of the options that it reads; other options are refused if they are set.
    own_options: its own options with their defaults (the first of a tuple of choices), which are
        set under ``objective.options``; ``meanings`` has a sentence on each.
    defaults: its own values of options, which take precedence over the preset's.
    needs_old_logprobs: whether the score reads the mean log-prob of each response under the policy
        that sampled it.
    separable: whether a token's loss depends on the policy's outputs at that token alone.
    batch_scaled: the advantages that ``batch_std`` scales.
    abstention: whether R is NaN for a response that says it does not know.
    """

    score_group: ScoreGroup
    token_loss: TokenLoss = clipped_policy_loss
    reads: frozenset[str] = COMMON | CLIPPED_LOSS
    own_options: Mapping[str, Any] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)
    defaults: Callable[[ObjectiveConfig], Mapping[str, Any]] = no_defaults
    needs_old_logprobs: bool = False
    separable: bool = True
    batch_scaled: tuple[str, ...] = ("A_c",)
    abstention: bool = False
    options: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    @property
    def loss_is_separable(self) -> bool:
        """Return whether :meth:`loss` may be called on some of a micro-batch's tokens, because it
        is a plain sum over them.
        """
        options = self.options
        by_token = options.ratio == "token" and options.tis_level in ("none", "token")
        return self.separable and by_token

    def loss(self, batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, Stats]:
        """Return per-token contributions [n] of a micro-batch, and statistics that add up over
        micro-batches and ranks. Raises :class:`UserError` if a user's loss fails.
        """
        name = self.options.name
        try:
            return self.token_loss(batch, outputs, self.options)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            if not is_import_path(name):
                raise
            raise UserError(f"objective.name={name} failed in its loss: {raised(error)}") from error

    def check_scores(self) -> None:
        """Raise :class:`UserError` if the method cannot score a group of four responses of which
        two are right: better before a rollout than after it.
        """
        self._scores_of_a_trial()

    @property
    def scores_confidence(self) -> bool:
        """Return whether a stated confidence has a reward."""
        R_c = self._scores_of_a_trial()[SCORES.index("R_c")]
        return not np.isnan(R_c).any()

    def _scores_of_a_trial(self) -> Sequence[np.ndarray]:
        correct = np.array([1.0, 1.0, 0.0, 0.0])
        confidence = np.array([0.9, 0.6, 0.7, 0.2])
        logprob = np.array([-0.5, -0.7, -0.9, -1.1])
        return self._scores_of_group(correct, confidence, logprob)

    def with_entropy_coef(self, coef: float) -> Method:
        """Return the method with another coefficient of the reasoning's entropy
        (``entropy_target``).
        """
        options = self.options.model_copy(update={"entropy_coef_reasoning": coef})
        return replace(self, options=options)

    def score(
        self, samples: Sequence[TrainingSample], scores: np.ndarray | None = None
    ) -> list[TrainingSample]:
        """Return the samples of a mini-batch with rewards, advantages, blocks and token weights.

        ``scores`` are the samples' :meth:`group_scores`, if they are known already. The
        denominators of the weights count the responses of the mini-batch, or of the groups that
        :meth:`block_members` names. Raises as :meth:`group_scores` does.
        """
        if scores is None:
            scores = self.group_scores(samples)
        scores, of_branches = self._scaled(samples, scores, self.branch_advantages(samples))
        blocks = [blocks_of(sample, self.options) for sample in samples]
        members = self.block_members(samples, blocks, scores)
        weights = self.token_weights(samples, blocks, members)
        scored = []
        for index, sample in enumerate(samples):
            _, R, R_c, A_r, A_c = scores[:, index]
            advantages = _token_advantages(blocks[index], A_r, A_c)
            for (begin, end), A in zip(sample.response.branches, of_branches[index], strict=True):
                advantages[begin:end] = A
            scored.append(
                replaced(
                    sample,
                    R=float(R),
                    R_c=float(R_c),
                    advantages=advantages,
                    block_ids=blocks[index],
                    weights=weights[index],
                )
            )
        return scored

    def group_scores(self, samples: Sequence[TrainingSample]) -> np.ndarray:
        """Return :data:`SCORES` of every sample, float64 [5, N], each from its own group alone.

        Groups are collected by prompt id, in any order. Raises :class:`UserError` for a group of
        one, ValueError if the method reads log-probs and they are missing.
        """
        judgements = [sample.judgement for sample in samples]
        groups = rows_of_groups(samples)
        for rows in groups.values():
            _check_group([judgements[row] for row in rows])
        R = self._all_correctness(samples)
        c = np.array([scored_confidence(each, self.options) for each in judgements], np.float64)
        logprob = np.array([self._mean_logprob(sample) for sample in samples], np.float64)
        lengths = np.array([s.judgement.length - s.response.branch_tokens for s in samples])
        scores = np.full((len(SCORES), len(samples)), np.nan)
        for rows in groups.values():
            group_scores = self._scores_of_group(R[rows], c[rows], logprob[rows])
            if self.options.overlong_buffer:
                group_scores = with_length_penalty(group_scores, lengths[rows], self.options)
            scores[:, rows] = group_scores
        return scores

    def scaled_scores(self, samples: Sequence[TrainingSample], scores: np.ndarray) -> np.ndarray:
        """Return the :meth:`group_scores` of a mini-batch with the advantages that ``batch_std``
        divides by one number for all groups (:func:`batch_scale`).
        """
        scaled, _ = self._scaled(samples, scores, self.branch_advantages(samples))
        return scaled

    def _scaled(
        self,
        samples: Sequence[TrainingSample],
        scores: np.ndarray,
        branches: Sequence[np.ndarray],
    ) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """Return the scores and the :meth:`branch_advantages` of a mini-batch, both divided by one
        number where ``batch_std`` asks for it.
        """
        R = self._all_correctness(samples)
        if self.options.advantage_normalization_confidence != "batch_std" or np.isnan(R).all():
            return scores, branches
        order = np.concatenate(list(rows_of_groups(samples).values()))
        answered = order[~np.isnan(R[order])]
        last = scores[A_C, answered]
        scale = batch_scale(np.concatenate([last, *(branches[row] for row in answered)]))
        scaled = scores.copy()
        for name in self.batch_scaled:
            scaled[SCORES.index(name)] /= scale
        return scaled, [of_sample / scale for of_sample in branches]

    def branch_advantages(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return A_c of each sample's confidences of earlier turns, float64 [branches].

        They are scored as the last ones are, by :data:`ScoreGroup`, among the answers of the same
        turn of the group's sessions. A turn that one session alone has reached is scored among the
        other sessions' last confidences.
        """
        advantages = [np.zeros(len(sample.response.turn_confidences)) for sample in samples]
        if not any(map(len, advantages)):
            return advantages
        R = self._all_correctness(samples)
        last = np.array([scored_confidence(one.judgement, self.options) for one in samples])
        for rows in rows_of_groups(samples).values():
            for members in _by_turn(samples, rows).values():
                c = np.array([self._branch_confidence(samples[row], at) for row, at in members])
                compared = [row for row, _ in members]
                if len(set(compared)) == 1:
                    others = [row for row in rows if row != compared[0]]
                    compared += others
                    c = np.append(c, last[others])
                A_c = self._scores_of_group(R[compared], c, np.full(len(c), np.nan))[A_C]
                for (row, at), A in zip(members, A_c, strict=False):
                    advantages[row][at] = A
        return advantages

    def _branch_confidence(self, sample: TrainingSample, number: int) -> float:
        _, confidence = sample.response.turn_confidences[number]
        status: ConfidenceStatus = "unparsable" if confidence is None else "ok"
        stated = replaced(sample.judgement, confidence=confidence, status=status, stated=None)
        return scored_confidence(stated, self.options)

    def _scores_of_group(
        self, R: np.ndarray, c: np.ndarray, logprob: np.ndarray
    ) -> Sequence[np.ndarray]:
        """Return :data:`SCORES` of a group, float64 [G] each. Raises :class:`UserError` if a user's
        method fails or returns something else.
        """
        name = self.options.name
        try:
            scores = self.score_group(R, c, logprob, self.options)
        except Exception as error:
            if not is_import_path(name):
                raise
            raise UserError(
                f"objective.name={name} failed to score a group: {raised(error)}"
            ) from error
        try:
            shapes = [np.asarray(each, np.float64).shape for each in scores]
        except (TypeError, ValueError) as error:
            shapes = [(one_line(error, 100),)]
        if shapes != [R.shape] * len(SCORES):
            raise UserError(
                f"objective.name={name}: score_group must return {len(SCORES)} arrays "
                f"({', '.join(SCORES)}) with a number for each of the {len(R)} responses, not "
                f"arrays of the shapes {shapes}"
            )
        return scores

    def _correctness(self, judgement: Judgement) -> float:
        if self.abstention and judgement.abstained:
            return np.nan
        return judgement.R

    def block_members(
        self, samples: Sequence[TrainingSample], blocks: Sequence[np.ndarray], scores: np.ndarray
    ) -> np.ndarray:
        """Return which samples each block trains on, bool [2, N], in the order of :data:`BLOCKS`.

        None trains on a response that ``mask_truncated`` leaves out. With ``block_groups: signal``
        a block trains on the groups alone in which it has a signal: a response with tokens in the
        block and an advantage other than 0 there. The reasoning's signal is also that correctness
        differs in the group, so that the same groups count for every method. A teacher has a signal
        in every group.
        """
        trained = self._trained(samples)
        members = np.stack([trained, trained])
        if self.options.block_groups == "all":
            return members
        signals = trained & self._signals(samples, blocks, scores)
        correctness = self._all_correctness(samples)
        for rows in rows_of_groups(samples).values():
            for number, block_id in enumerate(BLOCK_ORDER):
                if self.options.blocks("distill_coef")[number]:
                    continue
                group_has_signal = signals[number, rows].any()
                if block_id == BLOCK_REASONING:
                    group_has_signal = group_has_signal and differ(correctness[rows])
                if not group_has_signal:
                    members[number, rows] = False
        return members

    def token_weights(
        self,
        samples: Sequence[TrainingSample],
        blocks: Sequence[np.ndarray],
        members: np.ndarray,
    ) -> list[np.ndarray]:
        """Return each token's share of the loss, float64 [T_i] per response, from the block of each
        token and the ``members`` of both blocks, bool [2, N].

        By ``loss_aggregation`` a token of block b has weight_b / (N_sequences |o_i|), weight_b /
        N_tokens, weight_b / N_b or weight_b / (N_sequences L). N counts the members of b: their
        number, their tokens of both blocks, or of b; L is ``max_response_length``. Tokens of other
        responses have 0. |o_i| and the tokens of both blocks do not count those of branches, and
        the tokens of a session's K confidences count 1 / K each (:func:`shares_of`).
        """
        lengths = np.array([len(block) for block in blocks], np.int64)
        sampled = np.array(
            [
                np.count_nonzero(block[sample.response.branch_tokens :])
                for sample, block in zip(samples, blocks, strict=True)
            ],
            np.int64,
        )
        shares = [shares_of(one, block) for one, block in zip(samples, blocks, strict=True)]
        sequences = np.maximum(members.sum(axis=1), 1.0)
        tokens = np.maximum(members @ sampled, 1.0)
        block_tokens = []
        for member, block_id in zip(members, BLOCKS.values(), strict=True):
            counts = [
                share[block == block_id].sum() for share, block in zip(shares, blocks, strict=True)
            ]
            block_tokens.append(max(float(np.dot(member, counts)), 1.0))
        # from here on per token, indexed by its block: tokens of no block have the weight 0
        token_block = np.concatenate([np.empty(0, np.int8), *blocks])
        aggregation = self.options.loss_aggregation
        if aggregation == "sequence_mean":
            denominator = by_block_id(sequences)[token_block]
            denominator = denominator * np.repeat(np.maximum(sampled, 1), lengths)
        elif aggregation == "constant":
            denominator = by_block_id(sequences)[token_block]
            denominator = denominator * self.options.max_response_length
        elif aggregation == "token_mean":
            denominator = by_block_id(tokens)[token_block]
        else:
            denominator = by_block_id(block_tokens)[token_block]
        is_member = np.zeros(len(token_block), np.float64)
        for member, block_id in zip(members, BLOCKS.values(), strict=True):
            in_block = token_block == block_id
            is_member[in_block] = np.repeat(member, lengths)[in_block]
        weight = np.array([0.0, *self.options.weights])  # indexed by block id
        weights = weight[token_block] / denominator * is_member
        weights *= np.concatenate([np.empty(0), *shares])
        return np.split(weights, np.cumsum(lengths)[:-1])[: len(lengths)]

    def is_informative(
        self, samples: Sequence[TrainingSample], scores: np.ndarray | None = None
    ) -> bool:
        """Return whether the reasoning learns from a group which of its answers are right: their
        correctness differs, and a reasoning token has an advantage other than 0 and a weight.

        ``scores`` are the group's :meth:`group_scores`, if they are known already. Of a method
        whose scores need log-probs only the correctness is looked at. A reward that
        differs in equally right answers (a length, a stated confidence) does not count, so that the
        same groups are informative for every method.
        """
        if not differ(self._all_correctness(samples)):
            return False
        if self.needs_old_logprobs:
            return True
        return bool(self._pushed(samples, scores)[BLOCK_ORDER.index(BLOCK_REASONING)].any())

    def trains(self, samples: Sequence[TrainingSample], scores: np.ndarray | None = None) -> bool:
        """Return whether a group has a gradient in either block: an advantage other than 0 on a
        token with a weight. KL, entropy and a teacher do not count: every group would have them.
        """
        return bool(self._pushed(samples, scores).any())

    def _pushed(self, samples: Sequence[TrainingSample], scores: np.ndarray | None) -> np.ndarray:
        """Return which samples of a group have a token with a weight and an advantage other than 0,
        in each block, bool [2, N].
        """
        if scores is None:
            scores = self.group_scores(samples)
        blocks = [blocks_of(sample, self.options) for sample in samples]
        members = self.block_members(samples, blocks, scores)
        weighted = np.array(self.options.weights)[:, None] != 0
        return members & weighted & self._signals(samples, blocks, scores)

    def _signals(
        self, samples: Sequence[TrainingSample], blocks: Sequence[np.ndarray], scores: np.ndarray
    ) -> np.ndarray:
        """Return which samples have a token with an advantage other than 0 in each block, bool
        [2, N].
        """
        own = [
            block[one.response.branch_tokens :] for one, block in zip(samples, blocks, strict=True)
        ]
        signals = _has_tokens(own) & has_signal(_advantages_of(scores))
        for row, advantages in enumerate(self.branch_advantages(samples)):
            signals[BLOCK_ORDER.index(BLOCK_CONFIDENCE), row] |= has_signal(advantages).any()
        return signals

    def has_gradient(self, sample: TrainingSample, block: int | None = None) -> bool:
        """Return whether a scored sample can have a gradient, with the terms of KL, entropy and a
        teacher; in ``block`` if one is named.
        """
        weights = sample.weights
        if weights is None:
            return True
        is_clipped = self.token_loss is clipped_policy_loss
        if block is not None:
            weights = np.where(sample.block_ids == block, weights, 0.0)
        if is_clipped and not weights.any():
            return False
        every_token = ("kl_coef", "entropy_coef", "distill_coef")
        pushed_anyway = any(any(self.options.blocks(name)) for name in every_token)
        if not is_clipped or pushed_anyway or self.options.entropy_target:
            return True
        # exactly 0: a response with a residue of rounding counts as no signal, and is computed
        return bool(np.any(weights * sample.advantages))

    @staticmethod
    def has_advantage(sample: TrainingSample, block: int | None = None) -> bool:
        """Return whether a token of a scored sample has a weight and an advantage other than 0 by
        more than rounding; in ``block`` if one is named.
        """
        assert sample.weights is not None
        assert sample.advantages is not None
        pushed = (sample.weights != 0) & has_signal(sample.advantages)
        if block is not None:
            pushed &= sample.block_ids == block
        return bool(np.any(pushed))

    def _trained(self, samples: Sequence[TrainingSample]) -> np.ndarray:
        """Return which samples are trained on at all (``mask_truncated``), bool [N]."""
        if not self.options.mask_truncated:
            return np.ones(len(samples), bool)
        return np.array([sample.judgement.status != "truncated" for sample in samples])

    def _all_correctness(self, samples: Sequence[TrainingSample]) -> np.ndarray:
        """Return R of every sample, NaN for an abstention that the method rewards, float64 [N]."""
        return np.array([self._correctness(sample.judgement) for sample in samples], np.float64)

    def _mean_logprob(self, sample: TrainingSample) -> float:
        if not self.needs_old_logprobs:
            return np.nan
        if sample.mean_old_logprob is not None:
            return sample.mean_old_logprob
        old = sample.old_logprobs
        length = sample.judgement.length
        if old is None or len(old) != length:
            count = "none" if old is None else len(old)
            raise ValueError(
                f"objective {self.options.name} needs old_logprobs of all {length} tokens, got "
                f"{count}"
            )
        return mean_logprob(sample.response, old)


def mean_logprob(response: Response, logprobs: np.ndarray) -> float:
    """Return the mean in float64 of the ``logprobs`` [T] of a response's tokens over those that the
    policy sampled; 0 without tokens.
    """
    sampled = response.sampled(np.asarray(logprobs, np.float64))
    return float(sampled.mean()) if len(sampled) else 0.0


def rows_of_groups(samples: Sequence[TrainingSample]) -> dict[str, list[int]]:
    """Return the indices of the samples of each prompt, by its id, in the order in which they first
    occur.
    """
    groups: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.judgement.prompt_id, []).append(row)
    return groups


def differ(correctness: np.ndarray) -> bool:
    """Return whether the answers of a group are not all equally right, from R [G], NaN for an
    abstention.
    """
    abstained = np.isnan(correctness)
    if abstained.all():
        return False
    return bool(abstained.any() or np.ptp(correctness) >= REWARD_TOLERANCE)


def by_block_id(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return values of the two blocks, in the order of :data:`BLOCKS`, as an array that block ids
    index; a token of no block gets 1.
    """
    return np.array([1.0, *values])


def _advantages_of(scores: np.ndarray) -> np.ndarray:
    """Return the advantages of both blocks, float64 [2, N], of :data:`SCORES` [5, N]."""
    return scores[[SCORES.index("A_r"), SCORES.index("A_c")]]


def _has_tokens(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Return which samples have a token in each block, bool [2, N]."""
    return np.array([[np.any(block == block_id) for block in blocks] for block_id in BLOCK_ORDER])


def _token_advantages(blocks: np.ndarray, A_r: float, A_c: float) -> np.ndarray:
    """Return A_r on reasoning tokens, A_c on confidence tokens, 0 on tokens of neither block."""
    advantages = np.zeros(len(blocks))
    advantages[blocks == BLOCK_REASONING] = A_r
    advantages[blocks == BLOCK_CONFIDENCE] = A_c
    return advantages


def blocks_of(sample: TrainingSample, options: ObjectiveConfig) -> np.ndarray:
    """Return the block of each response token, int8 [T]: none for a token that the policy did not
    sample.
    """
    blocks = block_ids(sample.judgement, options)
    blocks[: sample.response.branch_tokens] = BLOCK_CONFIDENCE
    if sample.response.loss_mask is not None:
        blocks[~sample.response.loss_mask] = BLOCK_NONE
    return blocks


def shares_of(sample: TrainingSample, blocks: np.ndarray) -> np.ndarray:
    """Return what each token of a response counts, from its block, float64 [T]: 1, and 1 / K in
    each of K confidences of a session, so that it counts once, however many turns it has.
    """
    shares = np.ones(len(blocks))
    branches = len(sample.response.branch_ends)
    if branches:
        is_confidence = blocks == BLOCK_CONFIDENCE
        has_last = bool(is_confidence[sample.response.branch_tokens :].any())
        shares[is_confidence] = 1 / (branches + has_last)
    return shares


def _by_turn(
    samples: Sequence[TrainingSample], rows: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """Return the branches of a group by the number of their turn, each as the row of its sample and
    its place in that.
    """
    turns: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        for place, (turn, _) in enumerate(samples[row].response.turn_confidences):
            turns.setdefault(turn, []).append((row, place))
    return turns


def _check_group(judgements: Sequence[Judgement]) -> None:
    if len(judgements) < 2:
        raise UserError(
            f"prompt {judgements[0].prompt_id!r} has one response; a group needs at least 2 "
            "(rollout.group_size)"
        )
    for judgement in judgements:
        c = judgement.confidence
        if (judgement.status == "ok") != (c is not None) or (c is not None and not 0 <= c <= 1):
            raise UserError(
                f"prompt {judgement.prompt_id!r}: status {judgement.status!r} with confidence {c}; "
                "a number in [0, 1] goes with 'ok', and only with it"
            )
