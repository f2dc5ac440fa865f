"""The second stream of a forward pass: confidence statements that continue the reasoning with the adapter active.

The first stream is the model's own pass over prompts and responses, the one of a run without adapter, operation for
operation. Its attention leaves keys and values behind; the statements' tokens read them as they are, detached, and
only there the adapter acts. An adapter that acts on the whole text has prompt and reasoning in the second stream. So
the loss of the statements reaches the adapter's parameters alone, and the loss of the responses those of the model.
Between pipeline stages the hidden states of both streams travel as one tensor (docs/adapters.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dcpo.config import AdapterConfig
from megatron_dcpo.judging.statement import StatementForm
from megatron_dcpo.policy.adapter import Adapter
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.weights.peft_adapter import TOKENS

from megatron.core.tensor_parallel.mappings import (  # isort: skip
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)


@dataclass(frozen=True)
class StatementInputs:
    """Of each of B samples: the tokens of its prompt and response that the statement follows (``after``), the score of each
    value that can be stated, float64 [V], its weight in the loss, and what the confidence sees beside the text, float32
    [features] (None: nothing)."""

    form: StatementForm
    after: Sequence[int]
    scores: np.ndarray
    weights: np.ndarray
    features: np.ndarray | None


@dataclass(frozen=True)
class Statements:
    """The statements of a micro-batch: B sequences of n tokens. ``tokens``, ``positions``: int64 [B, n], or [B, P + n] with
    what they follow; ``prefix``: int64 [B, P], where in the flat micro-batch [b * s] the tokens stand that a statement
    follows, None where it is row by row what the micro-batch is; ``mask``: bool [B, 1, n, P + n], what each token attends
    to; ``scores`` [B, V], ``weights`` [B], ``features`` [B, features] or None. ``count``: samples; the others only fill
    up."""

    form: StatementForm
    count: int
    tokens: Tensor
    positions: Tensor
    prefix: Tensor | None
    mask: Tensor
    scores: Tensor
    weights: Tensor
    features: Tensor | None

    @classmethod
    def of(
        cls,
        inputs: StatementInputs,
        micro_batch: Tensor,
        offsets: Sequence[int],
        rows: int,
        multiple_of: int,
        before: int = 1,
        packed: bool = True,
    ) -> Statements:
        """``micro_batch``: its tokens [b, s]; ``offsets``: of each sample's first token; ``rows``: B, of which those without
        a sample do nothing; ``multiple_of``: what n and P are padded to (TP size under sequence parallelism); ``before``:
        the least P where the text belongs to the statements; ``packed``: a sample is not a row."""
        form, count = inputs.form, len(inputs.after)
        n = -(-len(form.tokens) // multiple_of) * multiple_of
        filling = (0, n - len(form.tokens))
        tokens, depths = np.pad(form.tokens, filling), np.pad(form.depths, filling)
        own = np.eye(n, dtype=bool)
        own[: len(form.sees), : len(form.sees)] = form.sees
        after = np.array([*inputs.after, *[1] * (rows - count)], np.int64)
        starts = np.array([*offsets[:count], *[0] * (rows - count)], np.int64)
        as_it_is = form.activated and not packed
        longest = max(after.max(), 1 if form.activated else before)
        places = np.arange(micro_batch.shape[1] if as_it_is else -(-longest // multiple_of) * multiple_of)
        known = places < after[:, None]
        mask = np.concatenate([np.repeat(known[:, None], n, 1), np.repeat(own[None], rows, 0)], axis=-1)
        features = inputs.features
        if features is not None:
            features = np.pad(features, ((0, rows - count), (0, 0)))
        on = lambda array: torch.as_tensor(np.ascontiguousarray(array), device=current_device())  # noqa: E731
        prefix = None if as_it_is else on(np.where(known, starts[:, None] + places, starts[:, None]))
        all_tokens, positions = on(np.tile(tokens, (rows, 1))), on(after[:, None] + depths)
        if not form.activated and prefix is not None:
            all_tokens = torch.cat([micro_batch.reshape(-1)[prefix], all_tokens], dim=1)
            positions = torch.cat([on(places).expand(rows, -1), positions], dim=1)
        return cls(
            form,
            count,
            all_tokens,
            positions,
            prefix,
            on(mask[:, None]),
            on(np.pad(inputs.scores, ((0, rows - count), (0, 0))).astype(np.float32)),
            on(np.pad(inputs.weights, (0, rows - count)).astype(np.float32)),
            None if features is None else on(features),
        )

    @property
    def before(self) -> int:
        """How many of ``tokens`` stand before the statement's first."""
        return self.tokens.shape[1] - self.mask.shape[2]


class StatementStream:
    """Makes a chunk's ``forward`` take ``statements``: it then returns (its output, :meth:`digit_logits`) on the last stage,
    and before it the output and the statements' hidden states as one tensor."""

    def __init__(self, adapter: Adapter, chunk: int) -> None:
        self.adapter, self.chunk = adapter, chunk
        self.gpt: Any = adapter.policy.gpt[chunk]
        self.config = adapter.policy.config
        self.statements: Statements | None = None  # whose keys and values are kept, or read
        self.kept: dict[int, tuple[Tensor, Tensor]] | None = None
        self.forward = self.gpt.forward
        self.gpt.forward = self
        for layer in self.gpt.decoder.layers:
            core = layer.self_attention.core_attention
            core.forward = partial(self._attention, layer.layer_number, core.forward)

    def __call__(self, tokens: Tensor, *args: Any, statements: Statements | None = None, **options: Any) -> Any:
        if statements is None:
            return self.forward(tokens, *args, **options)
        gpt, stated_input = self.gpt, None
        if not gpt.pre_process:
            received, shape = gpt.decoder.input_tensor, self._shape(*reversed(tokens.shape))
            size = shape[0] * shape[1]
            of_text, stated_input = received.split([size, len(received) - size])
            gpt.set_input_tensor((of_text.detach() if self.adapter.policy.frozen else of_text).view(*shape))
        self.kept = {} if statements.form.activated else None
        output = self.forward(tokens, *args, **options)
        self.statements = statements
        try:
            stated = self._state(statements, stated_input)
        finally:
            self.statements, self.kept = None, None
        if gpt.post_process:
            return output, self.digit_logits(stated, statements)
        return torch.cat([output.reshape(-1, 1, output.shape[-1]), stated])

    def _shape(self, length: int, batch: int) -> tuple[int, int, int]:
        """Of hidden states of ``length`` tokens between two stages."""
        parts = self.adapter.policy.topology.tp_size if self.config.sequence_parallel else 1
        return length // parts, batch, self.config.hidden_size

    def _state(self, statements: Statements, hidden: Tensor | None) -> Tensor:
        """The statements' tokens through this stage's layers: [B * n, 1, h], or this rank's part of them."""
        gpt, config = self.gpt, self.config
        positions = statements.positions.reshape(-1)
        rotary = gpt.rotary_pos_emb(statements.mask.shape[-1])
        with self.adapter.activated(self.chunk), _without_recomputation(gpt.decoder):
            if hidden is None:
                hidden = gpt.embedding(statements.tokens.reshape(1, -1), positions[None]).detach()
                if statements.features is not None:
                    hidden = hidden + self._seen(statements, hidden)
            else:
                gpt.set_input_tensor(hidden)
            hidden = gpt.decoder(
                hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary.index_select(0, positions)
            )
            if gpt.post_process and config.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, group=self.adapter.policy.topology.tp_group)
        return hidden

    def _seen(self, statements: Statements, hidden: Tensor) -> Tensor:
        """What the confidence sees beside the text, on the tokens of each statement that carry it."""
        assert statements.features is not None
        (rows, n), before = statements.tokens.shape, statements.before
        added = self.adapter.features(statements.features).to(hidden.dtype)
        seeing = statements.form.seeing
        full = F.pad(added[:, None].expand(-1, seeing, -1), (0, 0, before, n - seeing - before)).view(rows * n, 1, -1)
        if self.config.sequence_parallel:
            full = scatter_to_sequence_parallel_region(full, group=self.adapter.policy.topology.tp_group)
        return full

    def digit_logits(self, hidden: Tensor, statements: Statements) -> Tensor:
        """Logits fp32 [B, m, K] of the digits at the m tokens that choose one, at temperature 1; ``hidden``: [B * n, 1, h].
        The output layer stays as it is; tokens of the adapter's own are trained. Collective over the tensor-parallel
        ranks, of which each has its share of the gradient."""
        (rows, n), group = statements.tokens.shape, self.adapter.policy.topology.tp_group
        if not self.config.sequence_parallel:  # where they were gathered, the gradient is summed already
            hidden = self.adapter.copied(hidden)
        hidden = hidden.view(rows, n, -1)[:, statements.before :][:, statements.form.choosing]
        if statements.form.own_tokens:
            return self.adapter.share(F.linear(hidden.float(), self.adapter.parameters[TOKENS]))
        weight = self.adapter.policy.output_weight.detach()
        local = torch.as_tensor(statements.form.digits, device=weight.device) - group.rank() * len(weight)
        here = (local >= 0) & (local < len(weight))
        digits = weight[torch.where(here, local, 0)] * here[:, None]
        return self.adapter.reduced(hidden @ digits.t()).float()

    def _attention(
        self, layer: int, forward: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *a: Any, **o: Any
    ) -> Tensor:
        """The layer's attention, whose keys and values are kept in the first stream and read in the second."""
        if self.statements is None:
            if self.kept is not None:
                self.kept[layer] = k.detach(), v.detach()
            return forward(q, k, v, *a, **o)
        statements, (rows, n), before = self.statements, self.statements.tokens.shape, self.statements.before
        q, k, v = (x.reshape(rows, n, *x.shape[-2:]).transpose(1, 2) for x in (q, k, v))
        attend = partial(F.scaled_dot_product_attention, enable_gqa=q.shape[1] != k.shape[1])
        if self.kept is not None:
            kept = (_of_prefix(x, statements.prefix) for x in self.kept.pop(layer))
            k, v = (torch.cat(pair, dim=2) for pair in zip(kept, (k, v), strict=True))
        out = attend(q[:, :, before:], k, v, attn_mask=statements.mask)
        if before:
            text_q, text_k, text_v = (x[:, :, :before] for x in (q, k, v))
            out = torch.cat([attend(text_q, text_k, text_v, is_causal=True), out], dim=2)
        return out.transpose(1, 2).reshape(rows * n, 1, -1)


def _of_prefix(x: Tensor, prefix: Tensor | None) -> Tensor:
    """From keys or values of a batch [s, b, g, d] or of packed sequences [t, g, d] those of each statement's prefix,
    [B, g, P, d]."""
    if prefix is None:
        return x.permute(1, 2, 0, 3)
    return x.view(-1, *x.shape[-2:])[prefix].transpose(1, 2)


@contextmanager
def _without_recomputation(decoder: Any) -> Iterator[None]:
    """The layers of ``decoder`` keep their activations: their backward pass comes when the adapter is inactive again."""
    owned = [(decoder, "training")]
    for layer in decoder.layers:
        owned += [(layer, name) for name in vars(layer) if name.startswith("recompute_")]
        owned.append((layer.self_attention, "checkpoint_core_attention"))
    before = [getattr(owner, name) for owner, name in owned]
    for owner, name in owned:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for (owner, name), value in zip(owned, before, strict=True):
            setattr(owner, name, value)


def adapt(policy: Policy, config: AdapterConfig, features: int = 0, own_tokens: int = 0) -> Adapter:
    """A new adapter for ``policy``, whose chunks now take statements; ``features``: numbers that the confidence sees,
    ``own_tokens``: those that it chooses among instead of digits."""
    adapter = Adapter(policy, config, features, own_tokens)
    for chunk in range(len(policy.gpt)):
        StatementStream(adapter, chunk)
    return adapter
