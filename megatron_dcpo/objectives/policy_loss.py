"""Per-token loss contributions of one micro-batch. Their plain sum over micro-batches and ranks is
the loss.

Every denominator is already folded into the tokens' weights, so nothing here depends on how the
responses were split, packed or accumulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.types import BLOCK_NONE, BLOCKS, MicroBatch, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of more only overflows; every clip and cap is far below
MAX_KL = 10.0  # the released code's bound on one token's k3

Stats = dict[str, "Tensor"]


def clipped_policy_loss(
    batch: MicroBatch, outputs: TokenOutputs, options: ObjectiveConfig
) -> tuple[Tensor, Stats]:
    """Return w_t * (-min(rho A, clip(rho, 1 - low, 1 + high) A) + kl_coef KL - entropy_coef H),
    [n].

    rho is :func:`importance_ratio`, and each block has its own coefficients. Dual clip bounds the
    loss of negative advantages by dual_clip * |A|. With ``clip: cispo`` the first term is
    -clip(rho) A logp, where clip(rho) has no gradient (MiniMax-M1, 2025). It is multiplied by the
    engine's importance weights. A contains :func:`teacher_advantages`.
    """
    rho = importance_ratio(batch, outputs, options)
    by_teacher, stats = teacher_advantages(batch, outputs, options)
    A = masked(batch.columns["advantages"].to(rho), batch) + by_teacher
    clipped = rho.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.clip == "cispo":
        losses = -A * clipped.detach() * masked(outputs.logprobs, batch)
        binds = clipped != rho
    else:
        losses = (-A * rho).maximum(-A * clipped)
        binds = -A * clipped > -A * rho
    if options.dual_clip:
        losses = losses.minimum(options.dual_clip * A.abs())  # binds only if A < 0
    tis = importance_weights(batch, outputs, options)
    losses = losses * tis
    extra, stats_of_extra = regularizers(batch, outputs, options)
    stats |= stats_of_extra
    losses = (losses + extra) * masked(batch.columns["weights"].to(losses), batch)
    stats |= by_block("clipped", binds.to(rho), batch)
    stats |= by_block("ratio", rho, batch)
    if options.tis_level != "none":
        stats |= by_block("tis_weight", tis, batch)
        if options.tis_mode == "mask":
            stats |= by_block("tis_masked", (tis == 0).to(tis), batch)
    stats |= by_block("loss", losses, batch)
    stats |= by_block("tokens", rho.new_ones(rho.shape), batch)
    return losses, stats


def importance_ratio(batch: MicroBatch, outputs: TokenOutputs, options: ObjectiveConfig) -> Tensor:
    """Return rho of each token [n]: pi / pi_old, or pi / pi_engine with ``old_logprobs: engine``.

    With ``ratio: sequence`` it is the geometric mean over the response, with the gradient of the
    token's own log-prob, so that the blocks keep their own advantages (GSPO-token, Zheng et al.
    2025).
    """
    logprobs = masked(outputs.logprobs, batch)
    if options.old_logprobs == "engine":
        old = column(batch, "engine_logprobs", "old_logprobs")
    else:
        old = old_logprobs(batch, outputs)
    log_ratio = logprobs - masked(old.to(logprobs), batch)
    if options.ratio == "sequence":
        means = sequence_means(log_ratio.detach(), batch)
        log_ratio = means[batch.sequence_ids] + logprobs - logprobs.detach()
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def teacher_advantages(
    batch: MicroBatch, outputs: TokenOutputs, options: ObjectiveConfig
) -> tuple[Tensor, Stats]:
    """Return distill_coef * (log pi_teacher - log pi_old) per token [n], without gradient, with a
    coefficient for each block, and the sums of -(log pi_teacher - log pi_old) as ``teacher_kl``.

    Its mean over the policy's samples is -distill_coef KL(policy || teacher), and the policy
    gradient of that advantage is the gradient of this mean. Raises ValueError if the batch does not
    carry the teacher's log-probs.
    """
    nothing = outputs.logprobs.new_zeros(outputs.logprobs.shape)
    if not any(options.blocks("distill_coef")):
        return nothing, {}
    teacher = column(batch, "teacher_logprobs", "distill_coef_reasoning").to(nothing)
    d = masked(teacher - old_logprobs(batch, outputs), batch)
    coefficients = per_block(options.blocks("distill_coef"), batch, d)
    return coefficients * d, by_block("teacher_kl", -d, batch)


def regularizers(
    batch: MicroBatch, outputs: TokenOutputs, options: ObjectiveConfig
) -> tuple[Tensor, Stats]:
    """Return kl_coef * KL - entropy_coef * H per token [n], with :func:`kl_estimate` as KL and
    separate coefficients for each block.

    Raises ValueError if a coefficient needs log-probs that the batch does not carry.
    """
    extra = outputs.logprobs.new_zeros(outputs.logprobs.shape)
    stats = {}
    if any(options.blocks("kl_coef")):
        d = masked(column(batch, "ref_logprobs", "kl_coef").to(extra) - outputs.logprobs, batch)
        kl = kl_estimate(d, options.kl_estimator)
        extra = extra + per_block(options.blocks("kl_coef"), batch, extra) * kl
        stats = by_block("kl", kl, batch)
    entropy = masked(outputs.entropy.to(extra), batch)
    if any(options.blocks("entropy_coef")):
        extra = extra - per_block(options.blocks("entropy_coef"), batch, extra) * entropy
    return extra, stats | by_block("entropy", entropy, batch)


def kl_estimate(d: Tensor, estimator: str) -> Tensor:
    """Return k1 = -d, k2 = d^2 / 2 or k3 = exp(d) - d - 1 of one token, with d = logp_ref - logp;
    k3 is at most ``MAX_KL``.

    The mean of k1 and that of k3 over the policy's samples are KL(policy || reference), but as
    losses they have other gradients, in expectation: k1 none, k2 that of KL(policy || reference),
    k3 that of KL(reference || policy).
    """
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    d = d.clamp(max=MAX_LOG_RATIO)
    return (d.exp() - d - 1).clamp(max=MAX_KL)


def importance_weights(
    batch: MicroBatch, outputs: TokenOutputs, options: ObjectiveConfig
) -> Tensor:
    """Return the importance weight of each token [n], without gradient: pi_old / pi_engine of the
    token, or of its sequence, or the geometric mean over its sequence. Weights outside [tis_floor,
    tis_cap] are brought there, or set to 0 (``mask``).

    token, truncate: TIS (Yao et al. 2025); token, mask: IcePop (Ling team 2025); sequence, mask:
    MIS (Liu et al. 2025).
    """
    if options.tis_level == "none":
        return outputs.logprobs.new_ones(())
    engine = column(batch, "engine_logprobs", "tis_level").to(outputs.logprobs)
    log_weight = masked(old_logprobs(batch, outputs).to(engine) - engine, batch)
    if options.tis_level == "sequence":
        log_weight = sequence_sums(log_weight, batch)[batch.sequence_ids]
    elif options.tis_level == "geometric":
        log_weight = sequence_means(log_weight, batch)[batch.sequence_ids]
    weight = log_weight.clamp(max=MAX_LOG_RATIO).exp()
    bounded = weight.clamp(options.tis_floor, options.tis_cap)
    if options.tis_mode == "truncate":
        return bounded
    return weight * (bounded == weight)


def old_logprobs(batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
    """Return the log-probs [n] of the policy that sampled, which is the current policy if the
    rollout has a single update.
    """
    return batch.columns.get("old_logprobs", outputs.logprobs).to(outputs.logprobs).detach()


def sequence_sums(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum of ``values`` [n] over each sequence, [S]."""
    return values.new_zeros(len(batch.R)).index_add(0, batch.sequence_ids, values)


def sequence_means(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the mean of ``values`` [n], which are 0 on padding, over the response tokens of each
    sequence, [S].
    """
    counts = sequence_sums(masked(values.new_ones(values.shape), batch), batch)
    return sequence_sums(values, batch) / counts.clamp(min=1)


def per_block(values: Sequence[float], batch: MicroBatch, like: Tensor) -> Tensor:
    """Return the value of each token's block, [n]; 0 where there is no block."""
    table = [0.0, 0.0, 0.0]
    for value, block in zip(values, BLOCKS.values(), strict=True):
        table[block] = float(value)
    return like.new_tensor(table)[batch.columns["block_ids"].long()]


def by_block(name: str, values: Tensor, batch: MicroBatch) -> Stats:
    """Return the sum of ``values`` over each block as ``name/block``, detached; nothing for a part
    of a micro-batch.
    """
    if batch.is_part:
        return {}
    sums = {}
    for block, rows in batch.block_rows.items():
        sums[f"{name}/{block}"] = values.detach()[rows].sum()
    return sums


def masked(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return ``values`` [n] with 0 on padding, so that neither value nor gradient of padding
    survives (not even NaN).
    """
    return values.where(batch.columns["block_ids"] != BLOCK_NONE, values.new_zeros(()))


def column(batch: MicroBatch, name: str, option: str) -> Tensor:
    """Return a column of the batch. Raises ValueError if it is missing; ``option`` needs it."""
    if name not in batch.columns:
        raise ValueError(
            f"objective.{option} needs {name} for every response, and the batch has none"
        )
    return batch.columns[name]
