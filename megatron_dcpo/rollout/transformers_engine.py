"""The embedded engine: a transformers model in this process, sampled in batches with a KV cache.

It is the default without a GPU and the reference for the vLLM engine. It holds a full copy of the
model in Hugging Face layout and receives every update of the policy through the weight table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import (
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.architectures.config_json import (
    Architecture,
    check_model_dir,
    is_known,
    parse_architecture,
)
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.engine import (
    Engine,
    PartialRollout,
    Samples,
    SamplingConfig,
    SlotSteps,
    append_segment,
)
from megatron_dcpo.rollout.random_numbers import uniforms
from megatron_dcpo.rollout.routing import ExpertRecorder, RecordedExperts
from megatron_dcpo.rollout.tokens import read_eos_token_ids
from megatron_dcpo.rollout.transformers_library import auto_class, redirect_transformers_logging
from megatron_dcpo.runtime.device import (
    current_device,
    disable_cudnn_attention,
    fp32_head,
    fp32_product,
)
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.runtime.signals import RolloutAbandoned, stop_requested
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.types import FinishReason, Prompt, Response, ResponseKey
from megatron_dcpo.weights.hf_checkpoint import in_parts
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import is_constant

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

# Finished rows are dropped from the KV cache when a smaller share than this is still running; the
# second number applies if other samples wait for their slots.
_COMPACT_BELOW = 0.75
_REFILL_BELOW = 0.9
# between two looks of an engine that waits for calls at what else there is to do
_LOOK_SECONDS = 0.05
# tokens in which a sequence may differ from one whose cache it uses
_BRANCH = 32


class TransformersEngine(Engine):
    """Implements :class:`megatron_dcpo.rollout.engine.Engine`."""

    tensor_model_parallel_size = 1

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 512,
        record_experts: bool = False,
        arch: Architecture | None = None,
    ) -> None:
        self._recorder = ExpertRecorder(model) if record_experts else None
        self.model = model.eval().requires_grad_(False)
        layers = _new_cache(model).layers
        self._shares_caches = not record_experts and _keep_all_positions(layers)
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self.weights_version = 0
        self.slot_steps: SlotSteps = SlotSteps()
        tensors = {name: tensor.data for name, tensor in self.model.named_parameters()}
        for name, buffer in self.model.named_buffers():
            if is_constant(name):
                tensors[name] = buffer
        self._parameters = in_parts(arch, tensors)

    @classmethod
    def from_pretrained(
        cls,
        model_dir: str | Path,
        dtype: str = "fp32",
        max_num_seqs: int = 512,
        head_dtype: str = "auto",
        record_experts: bool = False,
    ) -> TransformersEngine:
        """Load a Hugging Face checkpoint directory. ``head_dtype`` is that of ``model.head_dtype``;
        with ``record_experts``, responses have ``experts``. Raises :class:`UserError` if the
        directory is missing or unreadable.
        """
        check_model_dir(model_dir)
        redirect_transformers_logging()
        disable_cudnn_attention()
        try:
            model: Any = auto_class("AutoModelForCausalLM").from_pretrained(
                model_dir,
                dtype=torch_dtype(dtype),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except Exception as error:  # transformers raises anything for a damaged directory
            raise UserError(
                f"cannot load a model from {model_dir}: {one_line(error, 500)}"
            ) from None
        head = model.get_output_embeddings()
        if fp32_head(head_dtype) and head.weight.dtype != torch.float32:
            head.forward = partial(_fp32_logits, head)
        return cls(
            model=model.to(current_device()),
            eos_token_ids=read_eos_token_ids(Path(model_dir)),
            max_num_seqs=max_num_seqs,
            record_experts=record_experts,
            arch=_known_architecture(Path(model_dir)),
        )

    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        for bucket in buckets:
            for piece in bucket:
                piece.write_into(self._parameters[piece.name])
        self.weights_version = version

    def sleep(self) -> None:
        """Do nothing: there is no KV cache between two calls, and the weights are overwritten in
        place.
        """

    def restart(self) -> None:
        """Do nothing: the model is an object of this process."""

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int = 0,
        partial: PartialRollout | None = None,
    ) -> Generator[list[Response], None, None]:
        """Yield responses as :class:`megatron_dcpo.rollout.engine.Engine` says: ``max_num_seqs`` at
        a time to their end. With ``partial`` the next sample, in the order given, gets the slot of
        a finished one.
        """
        if partial is not None:
            yield from self._generate(
                samples=samples, sampling=sampling, step=step, partial=partial
            )
            return
        # Similar lengths together: less left padding, and batches that finish together.
        ordered = sorted(samples, key=lambda sample: len(sample[0].token_ids))
        for start in range(0, len(ordered), self.max_num_seqs):
            yield from self._generate(ordered[start : start + self.max_num_seqs], sampling, step)

    @torch.no_grad()
    def _generate(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int,
        partial: PartialRollout | None = None,
    ) -> Iterator[list[Response]]:
        batch = self._batch(len(samples), sampling, step)
        for row, (prompt, index) in enumerate(samples):
            begun = partial.so_far(prompt, index) if partial else None
            batch.place(row, prompt, index, begun=begun)
        eos = torch.tensor(self.eos_token_ids, dtype=torch.int64, device=current_device())
        slots = min(self.max_num_seqs, len(samples))
        waiting = deque(range(len(samples)))
        running = _Running.none()
        while waiting or len(running.rows):
            if stop_requested():
                raise RolloutAbandoned
            running = self._admit(running=running, waiting=waiting, batch=batch, slots=slots)
            rows = running.rows
            token, logprob = self._sample(running, batch, sampling)
            live = ~batch.over[rows]
            self.slot_steps.total += slots
            self.slot_steps.used += int(live.sum())
            over = batch.record(rows, token, logprob, torch.isin(token, eos))
            if over.any():
                yield batch.responses(rows[over])
            if partial is not None and partial.should_stop():
                yield batch.responses((~batch.over).nonzero().squeeze(-1))
                return
            live &= ~over
            if not live.any():
                running = _Running.none()
                continue
            if live.float().mean() < (_REFILL_BELOW if waiting else _COMPACT_BELOW):
                keep = live.nonzero().squeeze(-1)
                running.keep(keep)
                token = token[keep]
            self._step(running, batch, token)

    @torch.no_grad()
    def serve(
        self, arrivals: Arrivals, sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        """Sample what arrives as :meth:`megatron_dcpo.rollout.engine.Engine.serve` says, in
        ``max_num_seqs`` slots.
        """
        slots = _Slots(self._batch(self.max_num_seqs, sampling, step))
        batch = slots.batch
        eos = torch.tensor(self.eos_token_ids, dtype=torch.int64, device=current_device())
        running = _Running.none()
        while not (arrivals.is_over and not slots.taken):
            if stop_requested():
                raise RolloutAbandoned
            slots.cancel(arrivals.take_cancelled())
            if not len(running.rows):
                arrivals.wait(_LOOK_SECONDS)
            if not len(running.rows) or running.can_grow:
                rows = slots.admit(arrivals)
                if rows:
                    running = running.concatenated(self._prefill(rows, batch))
            if not len(running.rows):
                yield []
                continue
            rows_now = running.rows
            token, logprob = self._sample(running, batch, sampling)
            ends = torch.isin(token, eos) | slots.ends(rows_now, token)
            self.slot_steps.total += self.max_num_seqs
            self.slot_steps.used += int((~batch.over[rows_now]).sum())
            over = batch.record(rows_now, token, logprob, ends)
            yield batch.responses(rows_now[over]) if over.any() else []
            kept = slots.still_running(rows_now, len(arrivals))
            if not len(kept):
                running = _Running.none()
                continue
            if len(kept) < len(rows_now):
                running.keep(kept)
                token = token[kept]
            self._step(running, batch, token)

    def _step(self, running: _Running, batch: _Batch, token: Tensor) -> None:
        """Run the rows that go on with their next token."""
        running.step(self.model, token)
        if self._recorder and batch.experts:
            choices = self._recorder.take(len(running.rows))
            batch.experts.note_tokens(running.rows, batch.count[running.rows], choices)

    def _batch(self, rows: int, sampling: SamplingConfig, step: int) -> _Batch:
        """Return a batch with so many empty rows."""
        experts = RecordedExperts(rows, sampling.max_tokens) if self._recorder else None
        return _Batch(
            rows=rows,
            sampling=sampling,
            step=step,
            version=self.weights_version,
            tops=min(sampling.top_logprobs, self.model.config.get_text_config().vocab_size),
            experts=experts,
        )

    def _sample(
        self, running: _Running, batch: _Batch, sampling: SamplingConfig
    ) -> tuple[Tensor, Tensor]:
        """Return the next token of the running rows and its log-prob; note the most probable
        tokens' log-probs if the sampling asks for them.
        """
        rows = running.rows
        token, logprob = sample_token(running.logits, batch.random_of(rows), sampling)
        if not sampling.raw_logprobs and not sampling.top_logprobs:
            return token, logprob
        raw = torch.log_softmax(running.logits.float(), dim=-1)
        tops = raw.topk(batch.tops.shape[-1], dim=-1).values
        batch.tops[rows.cpu(), batch.position(rows).cpu()] = tops.cpu()
        if sampling.raw_logprobs:
            logprob = raw.gather(-1, token[:, None]).squeeze(-1)
        return token, logprob

    def _admit(self, running: _Running, waiting: deque[int], batch: _Batch, slots: int) -> _Running:
        """Give the free slots to waiting samples: first those that continue, then those that begin,
        each in a separate pass.
        """
        if len(running.rows) and not running.can_grow:
            return running
        free = min(len(waiting), slots - len(running.rows))
        admitted = [waiting.popleft() for _ in range(free)]
        continued = [row for row in admitted if batch.begun[row] is not None]
        new = [row for row in admitted if batch.begun[row] is None]
        for rows in (continued, new):
            if rows:
                running = running.concatenated(self._prefill(rows, batch))
        return running

    def _prefill(self, rows: Sequence[int], batch: _Batch) -> _Running:
        """Run every distinct beginning of the samples ``rows`` once, and repeat its cache for each
        of the rows [B] that begin with it.
        """
        names = [batch.name(row) for row in rows]
        distinct = {name: batch.ids(row) for name, row in zip(names, rows, strict=True)}
        order = {name: index for index, name in enumerate(distinct)}
        sequences = list(distinct.values())
        branches = branches_among(sequences) if self._shares_caches else {}
        begun = _begun(self.model, sequences, branches)
        if self._recorder and batch.experts:
            taken = self._recorder.take(len(distinct))
            choices = [taken[order[name], -len(distinct[name]) :] for name in names]
            batch.experts.note_prompts(rows, choices)
        places = begun.rows.argsort()[[order[name] for name in names]]
        logits = begun.logits[places]
        begun.keep(places)
        return replace(begun, rows=torch.tensor(rows, device=current_device()), logits=logits)


def _known_architecture(model_dir: Path) -> Architecture | None:
    """Return the architecture of a model that can be trained here. One that only transformers has
    is sampled all the same.
    """
    path = model_dir / "config.json"
    config = read_json_object(path)
    if not is_known(config):
        return None
    return parse_architecture(config, str(path))


def _fp32_logits(head: torch.nn.Linear, hidden: Tensor) -> Tensor:
    """Return the logits of the output layer ``head`` for ``hidden`` [..., h], fp32 [..., V]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    out = torch.empty(len(rows), len(head.weight), dtype=torch.float32, device=hidden.device)
    return fp32_product(rows, head.weight.t(), out).view(*hidden.shape[:-1], -1)


def prefill(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> tuple[Tensor, Any, Tensor, Tensor]:
    """Run B sequences once, left-padded. Return logits [B, V] of the next token, the cache, its
    mask [B, W], and the last positions [B].
    """
    ids, mask = left_padded(sequences)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = _new_cache(model)
    logits = _last_logits(model, ids, mask, positions, cache)
    return logits, cache, mask, positions[:, -1]


def _new_cache(model: PreTrainedModel) -> DynamicCache:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def left_padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the ids of B sequences and their mask, both [B, W]."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, tokens in enumerate(sequences):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return ids.to(current_device()), mask.to(current_device())


def _last_logits(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: object
) -> Tensor:
    """Run tokens behind what the ``cache`` has, and return the logits [B, V] behind the last."""
    # An index and not a number: a slice of the states is not contiguous, and torch's product with
    # it would copy the output layer's weight once for each sequence.
    last = mask.new_tensor([ids.shape[1] - 1])
    out = model(
        ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=last,
    )
    return out.logits[:, -1]


@dataclass(frozen=True)
class Branch:
    """A sequence whose first ``common`` tokens are those of the sequence with the number ``stem``,
    and whose others are ``tokens``.
    """

    stem: int
    common: int
    tokens: Sequence[int]


def branches_among(sequences: Sequence[Sequence[int]]) -> dict[int, Branch]:
    """Return by their numbers the sequences of which another one, that is none of them, has all but
    at most :data:`_BRANCH` tokens; none if less than half of all tokens need not be run for it.
    """
    arrays = [np.asarray(one, dtype=np.int64) for one in sequences]
    stems: dict[int, bytes] = {}
    branches = {}
    for number in sorted(range(len(arrays)), key=lambda one: -len(arrays[one])):
        ids = arrays[number]
        least = ids[: max(len(ids) - _BRANCH, 0)].tobytes()
        stem = next((one for one, begins in stems.items() if begins.startswith(least)), None)
        if stem is None or not least:
            stems[number] = ids.tobytes()
            continue
        # the last token is run: its logits are those of the next one
        common = _common(arrays[stem], ids[:-1])
        branches[number] = Branch(stem, common, sequences[number][common:])
    saved = sum(branch.common for branch in branches.values())
    return branches if 2 * saved >= sum(map(len, arrays)) else {}


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return with how many equal tokens both begin, of which ``other`` is not the longer one."""
    differs = one[: len(other)] != other
    return int(differs.argmax()) if differs.any() else len(other)


def _begun(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], branches: Mapping[int, Branch]
) -> _Running:
    """Run the sequences, of branches only what their stems do not have. The ``rows`` are the
    sequences' numbers, in any order.
    """
    stems = [number for number in range(len(sequences)) if number not in branches]
    logits, cache, mask, position = prefill(model, [sequences[number] for number in stems])
    rows = torch.tensor(stems, device=current_device())
    running = _Running(rows=rows, logits=logits, cache=cache, mask=mask, position=position)
    if not branches:
        return running
    return running.concatenated(_branched(model, running, branches))


def _branched(model: PreTrainedModel, stems: _Running, branches: Mapping[int, Branch]) -> _Running:
    """Run branches on copies of the cache of ``stems``, which hides what their stem has behind the
    ``common`` tokens.
    """
    device = current_device()
    row_of = {number: row for row, number in enumerate(stems.rows.tolist())}
    copied = torch.tensor([row_of[one.stem] for one in branches.values()], device=device)
    common = torch.tensor([[one.common] for one in branches.values()], device=device)
    cache = copy(stems.cache)
    cache.layers = [copy(layer) for layer in cache.layers]
    cache.reorder_cache(copied)
    before = stems.mask[copied]
    before = before * (before.cumsum(-1) <= common)
    ids, mask = left_padded([one.tokens for one in branches.values()])
    positions = common + (mask.cumsum(-1) - 1).clamp(min=0)
    mask = torch.cat([before, mask], dim=1)
    logits = _last_logits(model, ids, mask, positions, cache)
    return _Running(
        rows=torch.tensor(list(branches), device=device),
        logits=logits,
        cache=cache,
        mask=mask,
        position=positions[:, -1],
    )


class _Batch:
    """The samples of a rollout, one in each of the ``rows`` [N], running or not, with their random
    numbers, tokens and log-probs [N, max_tokens].
    """

    def __init__(
        self,
        rows: int,
        sampling: SamplingConfig,
        step: int,
        version: int,
        tops: int,
        experts: RecordedExperts | None,
    ) -> None:
        device = current_device()
        longest = sampling.max_tokens
        self.experts = experts
        self.sampling = sampling
        self.step = step
        self.version = version
        self.samples: list[tuple[Prompt, int] | None] = [None] * rows
        self.begun: list[Response | None] = [None] * rows
        self._before = [0] * rows
        self._random = torch.zeros(rows, longest, dtype=torch.float64, device=device)
        # the number of tokens, with those from before, and the most that there may be
        self.count = torch.zeros(rows, dtype=torch.int64, device=device)
        self.most = torch.full((rows,), longest, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, longest, dtype=torch.float32, device=device)
        self.tops = torch.zeros(rows, longest, tops)
        self.over = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stopped = self.over.clone()

    def place(
        self,
        row: int,
        prompt: Prompt,
        index: int,
        begun: Response | None = None,
        most: int | None = None,
    ) -> None:
        """Put a sample into a row, in place of one that is over: it goes on after what was
        ``begun``, to ``most`` tokens.
        """
        before = 0 if begun is None else len(begun.token_ids)
        self.samples[row] = prompt, index
        self.begun[row] = begun
        self._before[row] = before
        draws = uniforms(
            seed=self.sampling.seed,
            step=self.step if begun is None else begun.step,
            prompt_id=prompt.prompt_id,
            sample_index=index,
            count=self.sampling.max_tokens,
        )
        self._random[row] = torch.from_numpy(draws)
        self.count[row] = before
        self.most[row] = self.sampling.max_tokens if most is None else most
        self.over[row] = False
        self.stopped[row] = False

    def sample(self, row: int) -> tuple[Prompt, int]:
        """Return prompt and index of the sample in a row."""
        found = self.samples[row]
        assert found is not None
        return found

    def name(self, row: int) -> Hashable:
        """Return a name that is equal for samples that begin with the same tokens."""
        prompt, index = self.sample(row)
        if self._before[row]:
            return (prompt.prompt_id, index)
        return prompt.prompt_id

    def ids(self, row: int) -> list[int]:
        prompt, _ = self.sample(row)
        ids = list(prompt.token_ids)
        begun = self.begun[row]
        if begun is not None:
            ids += begun.token_ids.tolist()
        return ids

    def position(self, rows: Tensor) -> Tensor:
        """Return the position of the next token. Rows that are over write after the tokens that
        were handed over.
        """
        return self.count[rows].clamp(max=self.sampling.max_tokens - 1)

    def random_of(self, rows: Tensor) -> Tensor:
        return self._random[rows, self.position(rows)]

    def record(self, rows: Tensor, token: Tensor, logprob: Tensor, ends: Tensor) -> Tensor:
        """Note the next token of ``rows``; return which of them are over now, bool [B]."""
        position = self.position(rows)
        live = ~self.over[rows]
        self.tokens[rows, position] = token
        self.logprobs[rows, position] = logprob
        self.count[rows] += live
        self.stopped[rows] |= ends & live
        over = live & (ends | (self.count[rows] == self.most[rows]))
        self.over[rows] |= over
        return over

    def responses(self, rows: Tensor) -> list[Response]:
        """Build responses from the current state of ``rows``."""
        lengths = self.count[rows].tolist()
        over = self.over[rows].tolist()
        stopped = self.stopped[rows].tolist()
        longest = max(lengths, default=0)
        ids = self.tokens[rows, :longest].cpu().numpy()
        logprobs = self.logprobs[rows, :longest].cpu().numpy()
        tops = self.tops[rows.cpu(), :longest].numpy()
        responses = []
        for number, row in enumerate(rows.tolist()):
            prompt, index = self.sample(row)
            before = self._before[row]
            new = slice(before, lengths[number])
            experts = None
            if self.experts is not None:
                experts = self.experts.of(row, before, lengths[number])
            finish_reason: FinishReason = "abort"
            if stopped[number]:
                finish_reason = "stop"
            elif over[number]:
                finish_reason = "length"
            response = Response(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                token_ids=ids[number, new],
                logprobs=logprobs[number, new],
                finish_reason=finish_reason,
                weights_version=self.version,
                top_logprobs=tops[number, new] if self.sampling.top_logprobs else None,
                experts=experts,
                step=self.step,
            )
            responses.append(append_segment(self.begun[row], response))
        return responses


class _Slots:
    """The rows of a ``batch`` that calls take while they run. ``taken`` are the calls by their
    rows.
    """

    def __init__(self, batch: _Batch) -> None:
        self.batch = batch
        self.taken: dict[int, EngineCall] = {}
        self._free = deque(range(len(batch.samples)))

    def admit(self, arrivals: Arrivals) -> list[int]:
        """Give free rows to the calls that wait; return the rows."""
        rows = []
        for call in arrivals.take(len(self._free)):
            row = self._free.popleft()
            self.batch.place(row, call.prompt, call.index, most=call.max_tokens)
            self.taken[row] = call
            rows.append(row)
        return rows

    def cancel(self, keys: Collection[ResponseKey]) -> None:
        """End the calls ``keys``, which get no response."""
        if keys:
            for row, call in self.taken.items():
                if call.key in keys:
                    self.batch.over[row] = True

    def ends(self, rows: Tensor, token: Tensor) -> Tensor:
        """Return which calls end with their next token because a text in them does, bool [B]."""
        ends = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        if not any(call.ends for call in self.taken.values()):
            return ends
        over = self.batch.over[rows].tolist()
        for place, (row, sampled) in enumerate(zip(rows.tolist(), token.tolist(), strict=True)):
            says = self.taken[row].ends
            if says is not None and not over[place]:
                ends[place] = says(sampled)
        return ends

    def still_running(self, rows: Tensor, waiting: int) -> Tensor:
        """Return the places in ``rows`` that go on: those that are not over, or all if few are over
        and nobody waits for their slots. The slots of the others are free.
        """
        live = ~self.batch.over[rows]
        few = live.float().mean() < (_REFILL_BELOW if waiting else _COMPACT_BELOW)
        if not few and waiting <= len(self._free):
            return torch.arange(len(rows), device=rows.device)
        self.free(rows[~live])
        return live.nonzero().squeeze(-1)

    def free(self, rows: Tensor) -> None:
        """Take rows back that are over."""
        for row in rows.tolist():
            del self.taken[row]
            self._free.append(row)


@dataclass
class _Running:
    """The running samples: the sample of each row [B], the logits of its next token [B, V], the
    cache, its mask [B, W] and the last position [B].
    """

    rows: Tensor
    logits: Tensor
    cache: Any
    mask: Tensor
    position: Tensor

    @classmethod
    def none(cls) -> _Running:
        nothing = torch.zeros(0, dtype=torch.int64, device=current_device())
        return cls(rows=nothing, logits=nothing, cache=None, mask=nothing, position=nothing)

    @property
    def can_grow(self) -> bool:
        """Return whether every layer keeps the keys of all positions, so that rows of another
        length can be added.
        """
        return _keep_all_positions(self.cache.layers)

    def keep(self, places: Tensor) -> None:
        """Keep these rows, in this order and as often as they are named, for the next step: their
        logits are not kept.
        """
        # ``batch_select_indices`` does not know layers with a state.
        self.cache.reorder_cache(places)
        self.rows = self.rows[places]
        self.mask = self.mask[places]
        self.position = self.position[places]

    def step(self, model: PreTrainedModel, token: Tensor) -> None:
        """Run ``token`` of every row, for the logits of the next one."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=1)
        self.position = self.position + 1
        out = model(
            token[:, None],
            attention_mask=self.mask,
            position_ids=self.position[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = out.logits[:, -1]

    def concatenated(self, other: _Running) -> _Running:
        """Return the rows of both, padded on the left to one width."""
        if not len(self.rows):
            return other
        unused = int(self.mask.any(0).int().argmax())  # columns whose sequences have all ended
        width = max(self.mask.shape[1] - unused, other.mask.shape[1])

        def both(ours: Tensor, theirs: Tensor, dim: int) -> Tensor:
            padded = []
            for tensor in (ours.narrow(dim, unused, ours.shape[dim] - unused), theirs):
                shape = list(tensor.shape)
                shape[dim] = width - shape[dim]
                padded.append(torch.cat([tensor.new_zeros(shape), tensor], dim))
            return torch.cat(padded)

        for layer, more in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.keys = both(layer.keys, more.keys, -2)
            layer.values = both(layer.values, more.values, -2)
        return _Running(
            rows=torch.cat([self.rows, other.rows]),
            logits=torch.cat([self.logits, other.logits]),
            cache=self.cache,
            mask=both(self.mask, other.mask, 1),
            position=torch.cat([self.position, other.position]),
        )


def _keep_all_positions(layers: Sequence[object]) -> bool:
    """Return whether all layers of a cache keep the keys of all positions."""
    return all(type(layer).__name__ == "DynamicLayer" for layer in layers)


def sample_token(logits: Tensor, random: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Draw one token per row of ``logits`` [B, V] by inverting the cumulative distribution at
    ``random`` (float64 [B]).

    Returns token ids [B] and their log-probs (fp32 [B]) under the distribution that was sampled:
    temperature, then top-k, then top-p applied, and renormalized. At temperature 0 it is the most
    probable token, whose log-prob is 0.
    """
    if sampling.temperature == 0:
        token = logits.argmax(dim=-1)
        return token, torch.zeros(len(token), dtype=torch.float32, device=logits.device)
    z = logits.float() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        z = _truncate(z, sampling.top_k, sampling.top_p)
    logp = torch.log_softmax(z, dim=-1)
    cumulative = logp.exp().double().cumsum(-1)
    target = random[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    token = token.clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None]).squeeze(-1)


def _truncate(z: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set logits outside the ``top_k`` largest, and outside the smallest set of mass ``top_p``, to
    minus infinity.
    """
    ordered, order = z.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k:
        keep[:, top_k:] = False
    if top_p < 1.0:
        probabilities = torch.softmax(ordered.masked_fill(~keep, -torch.inf), dim=-1)
        keep &= probabilities.cumsum(-1) - probabilities < top_p
    return z.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf)
