"""The embedded engine: a transformers model in this process, sampled in batches with a KV cache.

It is the default without a GPU and the reference for the vLLM engine. It holds a full copy of the model in Hugging Face
layout and receives every update of the policy through the weight table.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.rollout.engine import Engine, SamplingConfig, check_model_dir, read_eos_token_ids, uniforms
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.signals import RolloutAbandoned, stop_requested
from megatron_dcpo.types import Prompt, Response
from megatron_dcpo.weights.planner import WeightSlice

_COMPACT_BELOW = 0.75  # drop finished rows from the KV cache when less than this share is still running


def own_logs() -> None:
    """Warnings of transformers quote what a model directory says: they go the way of all logs, and no bar is drawn."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    transformers_logging.disable_progress_bar()


def auto_class(name: str) -> Any:
    """``AutoTokenizer`` or ``AutoModelForCausalLM``. Their import brings in scikit-learn and pandas (1 s) where it
    finds them, for a kind of generation that is not used here."""
    import transformers

    with patch.object(transformers.utils, "is_sklearn_available", bool):
        return getattr(transformers, name)


class TransformersEngine(Engine):
    """Implements :class:`megatron_dcpo.rollout.engine.Engine`."""

    tensor_model_parallel_size = 1

    def __init__(self, model: Any, eos_token_ids: Sequence[int], max_num_seqs: int = 512) -> None:
        self.model = model.eval().requires_grad_(False)
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self.weights_version = 0
        self._parameters = dict(self.model.named_parameters())

    @classmethod
    def from_pretrained(cls, model_dir: str | Path, dtype: str = "fp32", max_num_seqs: int = 512) -> TransformersEngine:
        """Load a Hugging Face checkpoint directory. Raises :class:`UserError` when it is missing or unreadable."""
        check_model_dir(model_dir)
        own_logs()
        try:
            model: Any = auto_class("AutoModelForCausalLM").from_pretrained(
                model_dir,
                dtype=torch_dtype(dtype),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except Exception as error:  # transformers raises anything for a damaged directory
            raise UserError(f"cannot load a model from {model_dir}: {one_line(error, 500)}") from None
        return cls(model.to(current_device()), read_eos_token_ids(Path(model_dir)), max_num_seqs)

    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        for bucket in buckets:
            for piece in bucket:
                piece.write_into(self._parameters[piece.name].data)
        self.weights_version = version

    def sleep(self) -> None:
        """Nothing to give back: there is no KV cache between two calls, and the weights are overwritten in place."""

    def restart(self) -> None:
        """Nothing to start: the model is an object of this process."""

    def stream(
        self, samples: Sequence[tuple[Prompt, int]], sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        # Similar lengths together: less left padding, and batches that finish together.
        ordered = sorted(samples, key=lambda sample: len(sample[0].token_ids))
        for start in range(0, len(ordered), self.max_num_seqs):
            yield from self._generate_batch(ordered[start : start + self.max_num_seqs], sampling, step)

    @torch.no_grad()
    def _generate_batch(
        self, samples: Sequence[tuple[Prompt, int]], sampling: SamplingConfig, step: int
    ) -> Iterator[list[Response]]:
        total, device = len(samples), current_device()
        draws = np.stack([uniforms(sampling.seed, step, p.prompt_id, i, sampling.max_tokens) for p, i in samples])
        random = torch.from_numpy(draws).to(device)
        tokens = torch.zeros(total, sampling.max_tokens, dtype=torch.int64, device=device)
        logprobs = torch.zeros(total, sampling.max_tokens, dtype=torch.float32, device=device)
        width = min(sampling.top_logprobs, self.model.config.get_text_config().vocab_size)
        tops = torch.zeros(total, sampling.max_tokens, width, dtype=torch.float32)
        stopped = torch.zeros(total, dtype=torch.bool, device=device)
        eos = torch.tensor(self.eos_token_ids, dtype=torch.int64, device=device)

        def responses(finished: Tensor, length: int) -> list[Response]:
            """Of the rows ``finished``, all of them ``length`` tokens long."""
            stops = stopped[finished].tolist()
            ids, lps = tokens[finished, :length].cpu().numpy(), logprobs[finished, :length].cpu().numpy()
            top = tops[finished.cpu(), :length].numpy() if sampling.top_logprobs else [None] * len(stops)
            return [
                Response(
                    prompt_id=samples[row][0].prompt_id,
                    sample_index=samples[row][1],
                    token_ids=ids[place],
                    logprobs=lps[place],
                    finish_reason="stop" if stops[place] else "length",
                    weights_version=self.weights_version,
                    top_logprobs=top[place],
                )
                for place, row in enumerate(finished.tolist())
            ]

        logits, cache, mask, position = self._prefill([prompt for prompt, _ in samples])
        rows = torch.arange(total, device=device)  # which response each running row of the cache is
        for t in range(sampling.max_tokens):
            if stop_requested():
                raise RolloutAbandoned
            token, logprob = sample_token(logits, random[rows, t], sampling)
            if sampling.raw_logprobs or sampling.top_logprobs:
                raw = torch.log_softmax(logits.float(), dim=-1)
                tops[rows.cpu(), t] = raw.topk(width, dim=-1).values.cpu()
                if sampling.raw_logprobs:
                    logprob = raw.gather(-1, token[:, None]).squeeze(-1)
            tokens[rows, t], logprobs[rows, t] = token, logprob
            ended = torch.isin(token, eos) & ~stopped[rows]
            stopped[rows[ended]] = True
            running = ~stopped[rows]
            over = ended | running if t + 1 == sampling.max_tokens else ended
            if over.any():
                yield responses(rows[over], t + 1)
            if t + 1 == sampling.max_tokens or not running.any():
                return
            if running.float().mean() < _COMPACT_BELOW:
                keep = running.nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                rows, mask, position, token = rows[keep], mask[keep], position[keep], token[keep]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            position = position + 1
            out = self.model(
                token[:, None],
                attention_mask=mask,
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            logits = out.logits[:, -1]

    def _prefill(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Run every prompt once, left-padded, and repeat its cache for each of the rows [B] that begin with it.

        Returns logits [B, V] of the last prompt token, the cache, the attention mask and the last positions.
        """
        from transformers import DynamicCache

        distinct = {prompt.prompt_id: prompt for prompt in prompts}
        places = {prompt_id: place for place, prompt_id in enumerate(distinct)}
        rows = torch.tensor([places[prompt.prompt_id] for prompt in prompts], device=current_device())
        width = max(len(p.token_ids) for p in prompts)
        ids = torch.zeros(len(distinct), width, dtype=torch.int64)
        mask = torch.zeros(len(distinct), width, dtype=torch.int64)
        for row, prompt in enumerate(distinct.values()):
            ids[row, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, width - len(prompt.token_ids) :] = 1
        ids, mask = ids.to(current_device()), mask.to(current_device())
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        out = self.model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache.batch_select_indices(rows)
        return out.logits[:, -1][rows], cache, mask[rows], positions[:, -1][rows]


def sample_token(logits: Tensor, random: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at ``random`` (float64 [B]).

    ``logits``: [B, V]. Returns token ids [B] and their log-probs (fp32 [B]) under the distribution that was sampled:
    temperature, then top-k, then top-p applied, and renormalised.
    """
    z = logits.float() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        z = _truncate(z, sampling.top_k, sampling.top_p)
    logp = torch.log_softmax(z, dim=-1)
    cumulative = logp.exp().double().cumsum(-1)
    target = random[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


def _truncate(z: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set logits outside the ``top_k`` largest, and outside the smallest set of mass ``top_p``, to minus infinity."""
    ordered, order = z.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[:, top_k:] = False
    if top_p < 1.0:
        probabilities = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
        keep &= probabilities.cumsum(-1) - probabilities < top_p
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf)
