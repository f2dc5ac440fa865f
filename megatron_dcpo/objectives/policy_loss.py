"""Per-token loss contributions of one micro-batch. Their plain sum over micro-batches and ranks is the loss.

Every denominator is already folded into ``TokenBatch.weights``, so nothing here depends on how the responses were
split, packed or accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_dcpo.objectives.options import Blocks, ObjectiveConfig
from megatron_dcpo.types import BLOCK_NONE, BLOCKS

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of more only overflows; every clip and cap lies far below
MAX_KL = 10.0  # the released code's bound on one token's k3

Stats = dict[str, "Tensor"]


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one micro-batch, flat [n], whole sequences only; padding is allowed (block 0).

    ``logprobs`` requires grad; ``old_logprobs`` by the policy that starts the update, ``engine_logprobs`` by the
    engine that sampled, ``ref_logprobs`` by the frozen reference; ``entropy`` of the policy at each token.
    ``weights`` from ``Objective.token_weights``; ``sequence_ids`` int64 in [0, S); ``correct`` [S] is R. Without
    ``with_statistics`` the loss alone is computed.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    block_ids: Tensor
    weights: Tensor
    sequence_ids: Tensor
    engine_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    correct: Tensor | None = None
    with_statistics: bool = True


def clipped_policy_loss(batch: TokenBatch, options: ObjectiveConfig) -> tuple[Tensor, Stats]:
    """w_t * (-min(rho A, clip(rho, 1 - low, 1 + high) A) + kl_coef KL - entropy_coef H), [n] (docs/algorithms.md#5-loss).

    rho = exp(logp - logp_old); each block has its own clip range and coefficients; dual clip bounds the loss of
    negative advantages by dual_clip * |A|; importance weights of the engine multiply the first term.
    """
    valid, log_ratio = _valid(batch), _log_ratio(batch)
    A = _where(valid, batch.advantages.to(log_ratio))
    rho = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    low, high = per_block(options.blocks("clip_low"), batch, rho), per_block(options.blocks("clip_high"), batch, rho)
    unclipped, clipped = -A * rho, -A * rho.clamp(1 - low, 1 + high)
    losses = unclipped.maximum(clipped)
    if options.dual_clip:
        losses = losses.minimum(options.dual_clip * A.abs())  # binds only where A < 0
    tis = importance_weights(batch, options)
    losses = losses * tis
    extra, stats = regularizers(batch, options)
    losses = (losses + extra) * _where(valid, batch.weights.to(losses))
    binds = (clipped > unclipped).to(rho)
    stats |= by_block("clipped", binds, batch) | by_block("ratio", rho, batch)
    if options.tis_level != "none":
        stats |= by_block("tis_weight", tis, batch)
    return losses, stats | by_block("loss", losses, batch) | by_block("tokens", rho.new_ones(rho.shape), batch)


def regularizers(batch: TokenBatch, options: ObjectiveConfig) -> tuple[Tensor, Stats]:
    """kl_coef * KL - entropy_coef * H per token [n], each block with its own coefficients; the KL by ``kl_estimate``.

    Raises ValueError when a coefficient asks for log-probs or entropies that the batch does not carry.
    """
    extra, stats = batch.logprobs.new_zeros(batch.logprobs.shape), {}
    valid = _valid(batch)
    if any(options.blocks("kl_coef")):
        d = _where(valid, _need(batch.ref_logprobs, "kl_coef", "ref_logprobs").to(extra) - batch.logprobs)
        kl = kl_estimate(d, options.kl_estimator)
        extra, stats = extra + per_block(options.blocks("kl_coef"), batch, extra) * kl, by_block("kl", kl, batch)
    if batch.entropy is not None or any(options.blocks("entropy_coef")):
        entropy = _where(valid, _need(batch.entropy, "entropy_coef", "entropy").to(extra))
        if any(options.blocks("entropy_coef")):
            extra = extra - per_block(options.blocks("entropy_coef"), batch, extra) * entropy
        stats |= by_block("entropy", entropy, batch)
    return extra, stats


def kl_estimate(d: Tensor, estimator: str) -> Tensor:
    """k1 = -d, k2 = d^2 / 2 or k3 = exp(d) - d - 1, at most ``MAX_KL``, of one token; d = logp_ref - logp (Schulman 2020).

    The mean of k1 and of k3 over the policy's samples is KL(policy || reference), but as a loss they have other gradients,
    in expectation: k1 none, k2 that of KL(policy || reference), k3 that of KL(reference || policy).
    """
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(max=MAX_LOG_RATIO)
    return (d.exp() - d - 1).clamp(max=MAX_KL)


def importance_weights(batch: TokenBatch, options: ObjectiveConfig) -> Tensor:
    """min(pi_old / pi_engine, tis_cap) per token, or of the whole sequence on each of its tokens; no gradient."""
    if options.tis_level == "none":
        return batch.logprobs.new_ones(())
    engine = _need(batch.engine_logprobs, "tis_level", "engine_logprobs").to(batch.logprobs)
    log_weight = _where(_valid(batch), batch.old_logprobs.to(engine) - engine).detach()
    if options.tis_level == "sequence":
        log_weight = sequence_sums(log_weight, batch)[batch.sequence_ids]
    return log_weight.clamp(max=MAX_LOG_RATIO).exp().clamp(max=options.tis_cap)


def sequence_sums(values: Tensor, batch: TokenBatch) -> Tensor:
    """Sum of ``values`` [n] over each sequence, [S]."""
    if batch.correct is not None:
        count = len(batch.correct)
    else:
        count = int(batch.sequence_ids.max()) + 1 if batch.sequence_ids.numel() else 0
    return values.new_zeros(count).index_add(0, batch.sequence_ids, values)


def per_block(values: Blocks, batch: TokenBatch, like: Tensor) -> Tensor:
    """The value of each token's block, [n]; 0 where there is no block."""
    table = [0.0, 0.0, 0.0]
    for name, block in BLOCKS.items():
        table[block] = float(getattr(values, name))
    return like.new_tensor(table)[batch.block_ids.long()]


def by_block(name: str, values: Tensor, batch: TokenBatch) -> Stats:
    """Sum of ``values`` over each block as ``name/block``; detached, so that sums over batches are plain additions."""
    if not batch.with_statistics:
        return {}
    values = values.detach()
    return {f"{name}/{block}": values[batch.block_ids == index].sum() for block, index in BLOCKS.items()}


def masked_logprobs(batch: TokenBatch) -> Tensor:
    """``logprobs`` with 0 on padding, so that neither value nor gradient of padding survives (not even NaN)."""
    return _where(_valid(batch), batch.logprobs)


def _log_ratio(batch: TokenBatch) -> Tensor:
    old = _where(_valid(batch), batch.old_logprobs.to(batch.logprobs))
    return masked_logprobs(batch) - old.detach()


def _valid(batch: TokenBatch) -> Tensor:
    return batch.block_ids != BLOCK_NONE


def _where(valid: Tensor, values: Tensor) -> Tensor:
    return values.where(valid, values.new_zeros(()))


def _need(tensor: Tensor | None, option: str, field: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"objective.{option} needs {field} for every response, and the batch has none")
    return tensor
