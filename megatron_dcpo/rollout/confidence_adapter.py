"""The second phase of an evaluation: an adapter states the confidence behind the reasoning that the model has written.

For the embedded engine. The model's keys and values of prompt and reasoning are made without the adapter; it acts on the
statement's tokens alone, as in training (docs/adapters.md#evaluation).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from megatron_dcpo.weights.peft_adapter import FEATURES, SavedAdapter, check_shapes, pairs


class ConfidenceAdapter:
    """States confidences with the ``saved`` adapter on the model of ``engine``. Raises :class:`UserError` where the two do
    not fit."""

    def __init__(
        self, engine: TransformersEngine, saved: SavedAdapter, form: StatementForm, tokens: TokenBytes
    ) -> None:
        self.engine, self.form, self.tokens = engine, form, tokens
        self.marker, self.active = saved.marker, False
        shapes = {name: tuple(parameter.shape) for name, parameter in engine.model.named_parameters()}
        check_shapes(saved, shapes)
        weight = engine.model.get_input_embeddings().weight
        self.features = saved.tensors[FEATURES].to(weight) if FEATURES in saved.tensors else None
        for name, (A, B) in pairs(saved).items():
            module = engine.model.get_submodule(name)
            module.register_forward_hook(self._hook(A.to(weight), B.to(weight), saved.scale))

    def _hook(self, A: Tensor, B: Tensor, scale: float) -> Any:
        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return output + F.linear(F.linear(inputs[0], A), B) * scale if self.active else None

        return hook

    @contextmanager
    def _activated(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def restated(self, responses: Sequence[Response], prompts: Mapping[str, Prompt]) -> list[Response]:
        """The responses with their reasoning as it is and, behind it, the confidence that the adapter states; with text."""
        eos = self.engine.eos_token_ids
        cut = [reasoning_of(r, prompts[r.prompt_id], self.tokens, eos, self.marker) for r in responses]
        order = sorted(range(len(cut)), key=lambda i: len(cut[i].token_ids) + len(prompts[cut[i].prompt_id].token_ids))
        c: dict[int, float] = {}
        size = self.engine.max_num_seqs
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            ids = [[*prompts[cut[i].prompt_id].token_ids, *cut[i].token_ids.tolist()] for i in rows]
            seen = np.stack([reasoning_features(cut[i].logprobs) for i in rows])
            c |= dict(zip(rows, stated(self.logits(ids, seen)).tolist(), strict=True))
        return [with_statement(response, self.form, c[i], self.tokens) for i, response in enumerate(cut)]

    @torch.no_grad()
    def logits(self, ids: Sequence[Sequence[int]], seen: np.ndarray) -> Tensor:
        """Of the digits wherever one is chosen, fp32 [N, m, K], behind each of N sequences of token ids; ``seen``: float32
        [N, features]. One pass over the statement and its branches."""
        model, form = self.engine.model, self.form
        _, cache, mask, last = prefill(model, ids)
        device, n = mask.device, len(form.tokens)
        tokens, depths, own = (torch.as_tensor(x, device=device) for x in (form.tokens, form.depths, form.sees))
        states = model.get_input_embeddings()(tokens.expand(len(ids), n))
        if self.features is not None:
            states[:, 0] += torch.as_tensor(seen).to(states) @ self.features.t()
        visible = torch.cat([mask.bool()[:, None].expand(-1, n, -1), own.expand(len(ids), n, n)], dim=-1)[:, None]
        hidden = torch.zeros(visible.shape, dtype=states.dtype, device=device)
        with self._activated():
            out = model(
                inputs_embeds=states,
                attention_mask=hidden.masked_fill(~visible, torch.finfo(states.dtype).min),
                position_ids=last[:, None] + 1 + depths,
                past_key_values=cache,
                use_cache=True,
            )
        choices = torch.as_tensor(form.digits, device=device)
        return out.logits[:, form.choosing][..., choices].float()


def reasoning_of(
    response: Response, prompt: Prompt, tokens: TokenBytes, eos_ids: Collection[int], marker: str
) -> Response:
    """A response up to where its statement begins."""
    split = split_blocks(response.token_ids, tokens, eos_ids, marker, BOXED if prompt.tests is None else FENCED)
    assert split.boundary is not None
    length = reasoning_length(response.token_ids, split.boundary, tokens.__getitem__, eos_ids)
    tops = None if response.top_logprobs is None else response.top_logprobs[:length]
    ids, logprobs = response.token_ids[:length], response.logprobs[:length]
    return replace(response, token_ids=ids, logprobs=logprobs, top_logprobs=tops)


def with_statement(reasoning: Response, form: StatementForm, c: float, tokens: TokenBytes) -> Response:
    """``reasoning`` with its text and, behind it, the confidence ``c``."""
    pieces = tokens.pieces(reasoning.token_ids)
    text = b"".join(pieces).decode(errors="replace") + form.text + f"{round(100 * c):02d}"
    ends = np.cumsum([*map(len, pieces)], dtype=np.int64)
    return replace(reasoning, text=text, token_ends=ends, finish_reason="stop")
