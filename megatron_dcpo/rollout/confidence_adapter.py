"""The second phase of an evaluation: an adapter states the confidence behind the reasoning that the model has written.

Who computes the digits' logits: the embedded engine (:class:`ConfidenceAdapter`), which knows activated adapters and what
they see beside the text; or, where the adapter acts on the whole text, whatever gives log-probs of the next token with it
(:func:`tree_logits`): vLLM, or a server (docs/adapters.md#evaluation).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dcpo.judging.answers import BOXED, FENCED
from megatron_dcpo.judging.blocks import split_blocks
from megatron_dcpo.judging.statement import StatementForm, reasoning_features, reasoning_length
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.objectives.stated import stated
from megatron_dcpo.rollout.transformers_engine import TransformersEngine, prefill
from megatron_dcpo.types import Prompt, Response
from megatron_dcpo.weights.peft_adapter import FEATURES, TOKENS, SavedAdapter, check_shapes, pairs

# token ids of N prompts with their reasoning, what the confidence sees beside them, float32 [N, features] -> [N, m, K]
DigitLogits = Callable[[Sequence[Sequence[int]], np.ndarray], Tensor]
NextLogprobs = Callable[[Sequence[Sequence[int]], Sequence[int]], np.ndarray]  # N sequences, K tokens -> [N, K]


@dataclass(frozen=True)
class Statement:
    """How confidences are stated: ``logits`` of the digits wherever one is chosen, for at most ``batch`` responses at once.
    ``encode`` gives the token ids of responses that have only text."""

    logits: DigitLogits
    form: StatementForm
    marker: str
    tokens: TokenBytes
    eos_token_ids: Collection[int]
    batch: int
    encode: Callable[[str], Sequence[int]] | None = None

    def restated(self, responses: Sequence[Response], prompts: Mapping[str, Prompt]) -> list[Response]:
        """The responses with their reasoning as it is and, behind it, the confidence that the adapter states; with text."""
        if self.encode is not None:
            responses = [replace(r, token_ids=np.array(self.encode(r.text or ""), np.int64)) for r in responses]
        eos = self.eos_token_ids
        cut = [reasoning_of(r, prompts[r.prompt_id], self.tokens, eos, self.marker) for r in responses]
        order = sorted(range(len(cut)), key=lambda i: len(cut[i].token_ids) + len(prompts[cut[i].prompt_id].token_ids))
        c: dict[int, float] = {}
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
            ids = [[*prompts[cut[i].prompt_id].token_ids, *cut[i].token_ids.tolist()] for i in rows]
            seen = np.stack([reasoning_features(cut[i].logprobs) for i in rows])
            c |= dict(zip(rows, stated(self.logits(ids, seen)).tolist(), strict=True))
        return [with_statement(response, self.form, c[i], self.tokens) for i, response in enumerate(cut)]


def tree_logits(form: StatementForm, next_logprobs: NextLogprobs) -> DigitLogits:
    """The digits' log-probs from those of the next token, the lead and every branch behind it asked for in turn."""

    def logits(ids: Sequence[Sequence[int]], seen: np.ndarray) -> Tensor:
        leads = [[*text, *form.lead] for text in ids]
        digits = form.digits.tolist()
        first = next_logprobs(leads, digits)[:, None]
        branches = [[*lead, digit] for lead in leads for digit in digits[: form.branches]]
        behind = next_logprobs(branches, digits).reshape(len(ids), -1, len(digits)) if branches else first[:, :0]
        return torch.from_numpy(np.concatenate([first, behind], axis=1).astype(np.float32))

    return logits


class ConfidenceAdapter:
    """The ``saved`` adapter on the model of ``engine``. Raises :class:`UserError` where the two do not fit."""

    def __init__(self, engine: TransformersEngine, saved: SavedAdapter, form: StatementForm) -> None:
        self.model, self.form, self.active = engine.model, form, False
        shapes = {name: tuple(parameter.shape) for name, parameter in engine.model.named_parameters()}
        check_shapes(saved, shapes)
        weight = engine.model.get_input_embeddings().weight
        self.features = saved.tensors[FEATURES].to(weight) if FEATURES in saved.tensors else None
        rows = engine.model.get_output_embeddings().weight[torch.as_tensor(form.digits, device=weight.device)]
        self.rows = saved.tensors[TOKENS].to(weight) if form.own_tokens else rows.detach()
        for name, (A, B) in pairs(saved).items():
            module = engine.model.get_submodule(name)
            module.register_forward_hook(self._hook(A.to(weight), B.to(weight), saved.scale))

    def _hook(self, A: Tensor, B: Tensor, scale: float) -> Any:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return output + F.linear(F.linear(inputs[0], A), B) * scale if self.active else None

        return hook

    @contextmanager
    def _activated(self, active: bool) -> Iterator[None]:
        self.active = active
        try:
            yield
        finally:
            self.active = False

    @torch.no_grad()
    def logits(self, ids: Sequence[Sequence[int]], seen: np.ndarray) -> Tensor:
        """Of the digits wherever one is chosen, fp32 [N, m, K], behind each of N sequences of token ids; ``seen``: float32
        [N, features]. The text in one pass, the statement and its branches in another."""
        model, form = self.model, self.form
        with self._activated(not form.activated):
            _, cache, mask, last = prefill(model, ids)
        device, n = mask.device, len(form.tokens)
        tokens, depths, own = (torch.as_tensor(x, device=device) for x in (form.tokens, form.depths, form.sees))
        states = model.get_input_embeddings()(tokens.expand(len(ids), n))
        if self.features is not None:
            states[:, : form.seeing] += (torch.as_tensor(seen).to(states) @ self.features.t())[:, None]
        visible = torch.cat([mask.bool()[:, None].expand(-1, n, -1), own.expand(len(ids), n, n)], dim=-1)[:, None]
        hidden = torch.zeros(visible.shape, dtype=states.dtype, device=device)
        with self._activated(True):
            out = model.base_model(
                inputs_embeds=states,
                attention_mask=hidden.masked_fill(~visible, torch.finfo(states.dtype).min),
                position_ids=last[:, None] + 1 + depths,
                past_key_values=cache,
                use_cache=True,
            )
        return F.linear(out.last_hidden_state[:, form.choosing], self.rows).float()


def reasoning_of(
    response: Response, prompt: Prompt, tokens: TokenBytes, eos_ids: Collection[int], marker: str
) -> Response:
    """A response up to where its statement begins."""
    split = split_blocks(response.token_ids, tokens, eos_ids, marker, BOXED if prompt.tests is None else FENCED)
    assert split.boundary is not None
    ids = response.token_ids[: reasoning_length(response.token_ids, split.boundary, tokens.__getitem__, eos_ids)]
    length, ends = len(ids), response.token_ends
    if ends is not None:  # of a server, whose tokens may be others
        length = int(np.searchsorted(ends, sum(map(len, tokens.pieces(ids))), side="right"))
        ends = ends[:length]
    tops = None if response.top_logprobs is None else response.top_logprobs[:length]
    return replace(response, token_ids=ids, logprobs=response.logprobs[:length], top_logprobs=tops, token_ends=ends)


def with_statement(reasoning: Response, form: StatementForm, c: float, tokens: TokenBytes) -> Response:
    """``reasoning`` with its text and, behind it, the confidence ``c``."""
    pieces, ends = tokens.pieces(reasoning.token_ids), reasoning.token_ends
    text = b"".join(pieces).decode(errors="replace") + form.written(c)
    ends = np.cumsum([*map(len, pieces)], dtype=np.int64) if ends is None else ends
    return replace(reasoning, text=text, token_ends=ends, finish_reason="stop")
