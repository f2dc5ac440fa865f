"""vLLM with two batches in flight, on a machine without a GPU: its own LLM, engine core, scheduler,
output futures and both connectors of routing replay, as it schedules by default on a GPU. Only the
model is not there: an executor says which tokens it would sample.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.distributed.aux_output_connector import worker as aux_output
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

EOS, WORD = 0, 7  # the tokens that the model samples
BLOCKS = 64  # of the KV cache, unless a test has fewer
BLOCK_TOKENS = 16


class Unread(AsyncModelRunnerOutput):
    """What a step has sampled; the choices of the experts are handed over when it is read, as in
    ``vllm/v1/worker/gpu/async_utils.py``.
    """

    def __init__(self, output: ModelRunnerOutput, pending: Any) -> None:
        self.output = output
        self.pending = pending

    def get_output(self) -> ModelRunnerOutput:
        if self.pending is not None:
            self.output.aux_output_connector_output = self.pending.process_output()
        return self.output


class InFlight(Executor):
    """Where vLLM calls its workers. A request's response has as many tokens as its prompt's first
    token says, the end token included; requests are told apart by nothing else.
    """

    blocks = BLOCKS

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.called: list[str] = []
        self.connector: Any = None
        self.step: SchedulerOutput | None = None

    def check_health(self) -> None:
        return

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
    ) -> Any:
        self.called.append(str(method))
        answer = getattr(self, f"_{method}", None)
        return [answer(*args) if answer else None]

    # ------------------------------------------------------------------------------ at the start
    def _get_kv_cache_spec(self) -> Any:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32
        )
        self.page_bytes = spec.page_size_bytes
        return {"layer": spec}

    def _get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBHNC"]

    def _determine_available_memory(self) -> int:
        return self.blocks * self.page_bytes

    def _initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        if not self.vllm_config.aux_output_config.enabled:
            return
        with patch.object(aux_output, "bind_routed_experts_capturer"):
            self.connector = aux_output.AuxOutputWorkerConnector(
                vllm_config=self.vllm_config, model=torch.nn.Module(), kv_cache_config=configs[0]
            )

    def _compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def _get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    # -------------------------------------------------------------------------------- at each step
    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Any:
        if self.connector is not None:
            self.connector.begin_step(scheduled.aux_output_connector_metadata)
        for name in scheduled.finished_req_ids:
            self.prompts.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.prompts[new.req_id] = list(new.prompt_token_ids or ())
            self.computed[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        self.computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.step = scheduled
        future: Future[Any] = Future()
        nothing = scheduled.total_num_scheduled_tokens == 0
        future.set_result(ModelRunnerOutput([], {}) if nothing else None)
        return future

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        step = self.step
        assert step is not None
        names = list(step.num_scheduled_tokens)
        counts = np.array([step.num_scheduled_tokens[name] for name in names])
        starts = np.array([self.computed[name] for name in names])
        sampled = [
            [self._sampled(name, start + count)]
            for name, start, count in zip(names, starts, counts, strict=True)
        ]
        tokens = np.array(sampled)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                logprob_token_ids=tokens,
                logprobs=np.full(tokens.shape, -1.0, np.float32),
                sampled_token_ranks=np.zeros(len(names), np.int64),
            ),
        )
        return AsyncOutputFuture(Unread(output, self._choices(names, counts, starts)), True)

    def _sampled(self, name: str, tokens: int) -> int:
        """Return the token after the first ``tokens`` of a sequence."""
        prompt = self.prompts[name]
        is_last = tokens - len(prompt) == prompt[0] - 1
        return EOS if is_last else WORD

    def _choices(self, names: list[str], counts: np.ndarray, starts: np.ndarray) -> Any:
        """Return the experts of a step, on their way to the host."""
        if self.connector is None:
            return None
        boundaries = np.concatenate([[0], np.cumsum(counts)])
        batch = type("Batch", (), {})()
        batch.req_ids = names
        batch.query_start_loc_np = boundaries
        batch.num_computed_tokens_np = starts
        pending = self.connector.prepare_output(batch)
        if pending is not None:
            ones = np.ones(len(names), np.int64)
            pending.enqueue_cpu_copy(num_sampled=ones, num_rejected=0 * ones)
        return pending
