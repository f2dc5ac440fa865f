"""The vLLM engine, in this process: one per GPU, or one over several consecutive ranks of
``torchrun``.

What vLLM does to its host process is put back: random number generators, thread count, environment.
The default process group must exist before the engine and is kept when the engine is dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import glob
import hashlib
import logging
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config.rules import check_engine_size
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.engine import (
    Engine,
    EngineError,
    PartialRollout,
    Samples,
    SamplingConfig,
    SlotSteps,
    append_segment,
)
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.local_engine import choose_engine
from megatron_dcpo.rollout.random_numbers import request_seed
from megatron_dcpo.rollout.routing import completed_experts, every_rank_returns_experts
from megatron_dcpo.rollout.tokens import read_eos_token_ids
from megatron_dcpo.rollout.vllm_host import (
    cache_bytes,
    check_release,
    known_arguments,
    prepare_environment,
    preserve_process_state,
)
from megatron_dcpo.runtime.device import (
    DeviceLost,
    capabilities,
    device_failed,
    empty_cache,
    fp32_head,
    host_memory_available,
    total_memory,
)
from megatron_dcpo.runtime.dtypes import dtype_bytes, dtype_name
from megatron_dcpo.runtime.host_memory import ledger
from megatron_dcpo.runtime.signals import RolloutAbandoned, launched_rank, stop_requested
from megatron_dcpo.types import FinishReason, Prompt, Response
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import engine_weight_bytes

if TYPE_CHECKING:
    from vllm import LLM, CompletionOutput, LLMEngine, SamplingParams

logger = logging.getLogger(__name__)

_WEIGHTS, _CACHE = "engine weights", "engine cache"  # in the ledger


# between two looks of an engine that waits for calls at what else there is to do
_LOOK_SECONDS = 0.05


class VllmEngine(Engine):
    """Implements :class:`megatron_dcpo.rollout.engine.Engine`.

    Raises :class:`UserError` when vLLM cannot be imported or cannot run the model.
    """

    def __init__(self, model_dir: str | Path, options: EngineOptions) -> None:
        self.model_dir = Path(model_dir)
        self.options = options
        self.arch = read_architecture(model_dir)
        check_engine_size(self.arch, options.tensor_model_parallel_size)
        choose_engine("vllm", model_dir)
        self.tensor_model_parallel_size = options.tensor_model_parallel_size
        self.eos_token_ids = read_eos_token_ids(self.model_dir)
        self.weights_version = 0
        self.slot_steps: SlotSteps = SlotSteps()
        self._asleep = False
        # how many tokens of a request its call was told (serve)
        self._told: dict[str, int] = {}
        self.llm: Any = self._start()
        # before vLLM's finalizer, which would tear down process groups of others
        atexit.register(self._close_at_exit)

    # ------------------------------------------------------------------------------------- sampling
    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int = 0,
        partial: PartialRollout | None = None,
    ) -> Generator[list[Response], None, None]:
        """Yield responses as :class:`megatron_dcpo.rollout.engine.Engine` says.

        Every sample is a separate request with its own seed. A continued sample has another seed
        than before, so its tokens are not those that it would have had. The ranks of one engine
        sample independently, and compare their responses at the end.
        """
        self._check_can_sample(sampling)
        digests = [b""] * len(samples)
        with _errors_of_generation(), preserve_process_state():
            for outputs in self._steps(
                samples=samples, sampling=sampling, step=step, partial=partial
            ):
                responses = []
                for number, completion in outputs:
                    prompt, index = samples[number]
                    begun = partial.so_far(prompt, index) if partial else None
                    new = self._response(
                        prompt=prompt,
                        index=index,
                        completion=completion,
                        top_logprobs=sampling.top_logprobs,
                        step=step,
                        before=0 if begun is None else len(begun.token_ids),
                    )
                    responses.append(append_segment(begun, new))
                    digests[number] = hashlib.sha256(responses[-1].token_ids.tobytes()).digest()
                yield responses
        self._check_ranks_agree(b"".join(digests))

    def serve(
        self, arrivals: Arrivals, sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        """Sample what arrives as :meth:`megatron_dcpo.rollout.engine.Engine.serve` says: a call is
        added to vLLM between two of its steps. For an engine of one rank.
        """
        self._check_can_sample(sampling)
        engine = self.llm.llm_engine
        calls: dict[str, EngineCall] = {}  # by the names of vLLM's requests
        number = 0
        self._told.clear()  # the names of an earlier rollout come again
        with _errors_of_generation(), preserve_process_state():
            try:
                while not (arrivals.is_over and not calls):
                    if stop_requested():
                        raise RolloutAbandoned
                    cancelled = arrivals.take_cancelled()
                    lost = [name for name, call in calls.items() if call.key in cancelled]
                    self._withdraw(lost, calls)
                    if not calls:
                        arrivals.wait(_LOOK_SECONDS)
                    for call in arrivals.take(self.options.at_once):
                        number += 1
                        calls[str(number)] = call
                        self._add_call(str(number), call, sampling, step)
                    yield self._serve_step(calls, sampling, step) if calls else []
                drain(engine)
            except (RolloutAbandoned, GeneratorExit):
                self._withdraw(list(calls), calls)
                drain(engine)
                raise

    def _add_call(self, name: str, call: EngineCall, sampling: SamplingConfig, step: int) -> None:
        params = self._params(
            sampling=replace(sampling, max_tokens=call.max_tokens),
            step=step,
            prompt=call.prompt,
            index=call.index,
            begun=None,
            # what is cut at a text is looked at after every step
            partial=call.ends is not None,
        )
        tokens = {"prompt_token_ids": list(call.prompt.token_ids)}
        self.llm.llm_engine.add_request(name, tokens, params)

    def _serve_step(
        self, calls: dict[str, EngineCall], sampling: SamplingConfig, step: int
    ) -> list[Response]:
        """Return the responses that are finished after a step; their calls are taken out."""
        finished = []
        ended: list[str] = []
        for output in self.llm.llm_engine.step():
            call = calls.get(output.request_id)
            if call is None:  # withdrawn
                continue
            completion = output.outputs[0]
            length = self._length_told(output.request_id, call, completion)
            if not output.finished and length is None:
                continue
            self.slot_steps.total += len(completion.token_ids)
            self.slot_steps.used += len(completion.token_ids)
            new = self._response(call.prompt, call.index, completion, sampling.top_logprobs, step)
            if length is not None:
                new = replace(
                    new,
                    token_ids=new.token_ids[:length],
                    logprobs=new.logprobs[:length],
                    finish_reason="stop",
                )
            finished.append(new)
            if output.finished:
                del calls[output.request_id]
            else:
                ended.append(output.request_id)
        self._withdraw(ended, calls)
        return finished

    def _length_told(self, name: str, call: EngineCall, completion: CompletionOutput) -> int | None:
        """Tell a call the tokens that are new; return the length at which it ends, if it does."""
        if call.ends is None:
            return None
        told = self._told.get(name, 0)
        for length, token in enumerate(completion.token_ids[told:], start=told + 1):
            if call.ends(int(token)):
                return length
        self._told[name] = len(completion.token_ids)
        return None

    def _withdraw(self, names: list[str], calls: dict[str, EngineCall]) -> None:
        """Take requests back from vLLM."""
        if names:
            self.llm.llm_engine.abort_request(names)
        for name in names:
            calls.pop(name, None)
            self._told.pop(name, None)

    def _check_can_sample(self, sampling: SamplingConfig) -> None:
        """Raise ValueError for log-probs that the engine does not report, and :class:`EngineError`
        if it has other weights than it should.
        """
        if (sampling.raw_logprobs or sampling.top_logprobs) and not self.options.raw_logprobs:
            raise ValueError(
                "this engine reports log-probs of the sampled distribution; build it with "
                "raw_logprobs"
            )
        if self.llm.get_weight_version() != str(self.weights_version):
            raise EngineError(
                f"the engine holds weights version {self.llm.get_weight_version()}, not "
                f"{self.weights_version}"
            )

    def _steps(
        self, samples: Samples, sampling: SamplingConfig, step: int, partial: PartialRollout | None
    ) -> Iterator[list[tuple[int, Any]]]:
        """Yield what each step of the engine finishes: the number of the sample, its completion
        (None: no token yet). A signal ends it early, but not between the ranks of one engine: they
        would no longer step together.
        """
        engine = self.llm.llm_engine
        slots = min(self.options.at_once, len(samples))
        unfinished: dict[int, Any] = dict.fromkeys(range(len(samples)))
        for number, (prompt, i) in enumerate(samples):
            begun = partial.so_far(prompt, i) if partial else None
            tokens = {
                "prompt_token_ids": [
                    *prompt.token_ids,
                    *(begun.token_ids.tolist() if begun else ()),
                ]
            }
            engine.add_request(
                str(number),
                tokens,
                self._params(
                    sampling=sampling,
                    step=step,
                    prompt=prompt,
                    index=i,
                    begun=begun,
                    partial=partial is not None,
                ),
            )
        try:
            while engine.has_unfinished_requests():
                if self.tensor_model_parallel_size == 1 and stop_requested():
                    raise RolloutAbandoned
                outputs = engine.step()
                unfinished |= {int(output.request_id): output.outputs[0] for output in outputs}
                finished = [int(output.request_id) for output in outputs if output.finished]
                completions = [(number, unfinished.pop(number)) for number in finished]
                self.slot_steps.total += slots
                self.slot_steps.used += (
                    len(outputs) if partial else sum(len(c.token_ids) for _, c in completions)
                )
                if completions:
                    yield completions
                if partial is not None and partial.should_stop():
                    engine.abort_request([str(number) for number in unfinished])
                    drain(engine)
                    yield list(unfinished.items())
                    return
            drain(engine)
        except (RolloutAbandoned, GeneratorExit):
            engine.abort_request([str(number) for number in unfinished])
            drain(engine)
            raise

    def _params(
        self,
        sampling: SamplingConfig,
        step: int,
        prompt: Prompt,
        index: int,
        begun: Response | None,
        partial: bool,
    ) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        before = len(begun.token_ids) if begun else 0
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            max_tokens=sampling.max_tokens - before,
            seed=request_seed(
                seed=sampling.seed,
                step=begun.step if begun else step,
                prompt_id=prompt.prompt_id,
                index=index,
                begun=before,
            ),
            logprobs=sampling.top_logprobs,
            flat_logprobs=True,  # lists of numbers, not an object for each token
            stop_token_ids=list(self.eos_token_ids),
            ignore_eos=True,  # the ids above are the only end, as with every other engine
            detokenize=False,
            # the output after every step (a reference, not a copy), because it may be the last one
            output_kind=RequestOutputKind.CUMULATIVE if partial else RequestOutputKind.FINAL_ONLY,
        )

    def _response(
        self,
        prompt: Prompt,
        index: int,
        completion: CompletionOutput | None,
        top_logprobs: int,
        step: int,
        before: int = 0,
    ) -> Response:
        """Return what a completion has behind the ``before`` tokens that it went on from."""
        if completion is None:
            return Response(
                prompt_id=prompt.prompt_id,
                sample_index=index,
                token_ids=np.zeros(0, np.int64),
                logprobs=np.zeros(0, np.float32),
                finish_reason="abort",
                weights_version=self.weights_version,
                step=step,
            )
        versions = {span.version for span in completion.weight_versions or ()}
        if versions - {str(self.weights_version)}:
            raise EngineError(
                f"{prompt.prompt_id} was sampled by weights {versions}, not {self.weights_version}"
            )
        ids = np.array(completion.token_ids, np.int64)
        finish_reason: FinishReason = "length"
        if completion.finish_reason is None:
            finish_reason = "abort"
        elif completion.finish_reason == "stop":
            finish_reason = "stop"
        # at every position the token that was sampled, then the most probable ones, in order
        flat = np.array(completion.logprobs.logprobs, np.float32)
        logprobs = flat.reshape(len(ids), 1 + top_logprobs)
        experts = None
        if self.options.record_experts and completion.finish_reason is not None:
            length = len(prompt.token_ids) + before + len(ids) - 1
            experts = completed_experts(length, prompt, completion.routed_experts)
        return Response(
            prompt_id=prompt.prompt_id,
            sample_index=index,
            token_ids=ids,
            logprobs=logprobs[:, 0].copy(),
            finish_reason=finish_reason,
            weights_version=self.weights_version,
            top_logprobs=logprobs[:, 1:] if top_logprobs else None,
            experts=experts,
            step=step,
        )

    def _check_ranks_agree(self, digest: bytes) -> None:
        """Check that all ranks sampled the same tokens."""
        if self.tensor_model_parallel_size == 1:
            return
        from vllm.distributed import get_tp_group

        digests: list[Any] = [None] * self.tensor_model_parallel_size
        dist.all_gather_object(digests, digest, group=get_tp_group().cpu_group)
        if len(set(digests)) > 1:
            raise EngineError("the ranks of one engine sampled different tokens")

    # -------------------------------------------------------------------------------------- weights
    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        """Overwrite the weights through vLLM's weight-transfer API; a sleeping engine gets its
        weights' memory back first, its KV cache last.
        """
        self._wake("weights")
        with _restart_may_mend("vLLM could not begin the weight update"):
            self.llm.start_weight_update()
        for bucket in buckets:
            with _restart_may_mend("vLLM refused a bucket of weights"):
                self.llm.update_weights({"update_info": {"pieces": bucket, "arch": self.arch}})
        with _restart_may_mend("vLLM could not finish the weight update"):
            self.llm.finish_weight_update(weight_version=str(version))
        self._wake("kv_cache")
        self._asleep = False
        self.forget_prompts()  # or they would be continued from the old weights' keys and values
        self.weights_version = version

    def forget_prompts(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise EngineError("vLLM did not clear its prefix cache: a request is still running")

    def sleep(self) -> None:
        """Discard weights and KV cache (level 2): new weights are about to come."""
        if self._can_sleep() and not self._asleep:
            with _ends_the_process("vLLM could not put its memory to sleep"):
                self.llm.sleep(level=2)
            self._asleep = True
            ledger.drop(_CACHE)
            ledger.drop(_WEIGHTS)

    def _wake(self, tag: str) -> None:
        if self._asleep:
            with _ends_the_process(f"vLLM could not wake up its {tag}"):
                self.llm.wake_up(tags=[tag])
            self._enter_in_ledger(tag)

    def _enter_in_ledger(self, tag: str) -> None:
        options = self.options
        weights = engine_weight_bytes(
            arch=self.arch,
            itemsize=dtype_bytes(options.dtype),
            quantization=options.quantization,
        )
        weights //= options.tensor_model_parallel_size
        share = int(options.gpu_memory_utilization * total_memory())
        cache = options.arguments.get("kv_cache_memory_bytes") or max(0, share - weights)
        ledger.put(*((_WEIGHTS, weights) if tag == "weights" else (_CACHE, cache)))

    def _can_sleep(self) -> bool:
        return self.options.sleep and capabilities().separate_memory

    # ------------------------------------------------------------------------------- start and stop
    def restart(self) -> None:
        self.close()
        with _ends_the_process("vLLM, which had started before, does not start again"):
            self.llm = self._start()
        self.weights_version = 0

    def close(self) -> None:
        """Drop the engine, but keep the process group that it would tear down.

        A sleeping engine is woken up first: vLLM's allocator unmaps all memory that is freed, also
        memory that ``sleep`` has unmapped, and after that error gives nothing back. Raises
        :class:`DeviceLost` if there is no memory for waking up.
        """
        if self.llm is not None and self._asleep:
            with _ends_the_process("vLLM could not wake up to be closed"):
                self.llm.wake_up()
            self._asleep = False
        self._shut_down()

    def _close_at_exit(self) -> None:
        with contextlib.suppress(DeviceLost):  # the process ends, and with it whatever sleeps
            self.close()
        self._shut_down()

    def _shut_down(self) -> None:
        if self.llm is None:
            return
        import vllm.v1.engine.core as core

        kept = core.cleanup_dist_env_and_memory
        core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
        try:
            with contextlib.suppress(Exception):  # a broken engine may not shut down in order
                self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.unfreeze()  # vLLM froze what it had made, and with it what holds the memory
            gc.collect()
            empty_cache()
        finally:
            core.cleanup_dist_env_and_memory = kept
        self._asleep = False
        ledger.drop(_CACHE)
        ledger.drop(_WEIGHTS)

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM that follow from the options and this process."""
        options = self.options
        arguments = dict(options.arguments)
        arguments.pop("enforce_eager", None)
        if options.max_model_len:
            arguments["max_model_len"] = min(
                options.max_model_len, self.arch.max_position_embeddings
            )
        cache = cache_bytes(
            arch=self.arch,
            options=options,
            available=host_memory_available(),
            ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        if cache:
            arguments["kv_cache_memory_bytes"] = cache
        if not capabilities().separate_memory:
            # vLLM's CPU build fails where the prompt of a request with a seed is split: its runner
            # turns the generator back, which one of the CPU refuses.
            arguments.setdefault("enable_chunked_prefill", False)
        experts_on_gpu = self.arch.num_experts and capabilities().separate_memory
        if experts_on_gpu and "moe_backend" in (known_arguments() or ()):
            # vLLM's first choice on Blackwell, FlashInfer's kernels, reorders the experts' weights,
            # so that updates could not be written into them.
            arguments.setdefault("moe_backend", "triton")
        if fp32_head(options.head_dtype):
            overrides = arguments.get("hf_overrides") or {}
            arguments["hf_overrides"] = {"head_dtype": "float32", **overrides}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
        if options.record_experts:
            arguments["enable_return_routed_experts"] = True
        return arguments

    def _start(self) -> LLM:
        options = self.options
        check_release()
        prepare_environment()
        self._unlink_shared_memory()
        arguments = self._arguments()
        eager = options.arguments.get("enforce_eager", False) or not capabilities().cuda_graphs
        try:
            with preserve_process_state(), contextlib.ExitStack() as stack:
                from vllm import LLM

                if options.record_experts:
                    stack.enter_context(every_rank_returns_experts())

                from megatron_dcpo.rollout.vllm_weights import register

                llm = LLM(
                    str(self.model_dir),
                    dtype=dtype_name(options.dtype),
                    tensor_parallel_size=options.tensor_model_parallel_size,
                    gpu_memory_utilization=options.gpu_memory_utilization,
                    max_num_seqs=options.at_once,
                    enforce_eager=eager,
                    logprobs_mode="raw_logprobs" if options.raw_logprobs else "processed_logprobs",
                    load_format="dummy" if options.dummy_weights else "auto",
                    weight_transfer_config={"backend": register()},
                    enable_sleep_mode=self._can_sleep(),
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # no defaults besides SamplingConfig
                    seed=options.seed,
                    disable_log_stats=True,
                    **arguments,
                )
        except ImportError as error:
            raise UserError(
                f"rollout.engine=vllm: vLLM is installed but cannot be imported ({error})"
            ) from None
        except (ValueError, torch.OutOfMemoryError) as error:  # if the memory does not suffice
            raise UserError(
                f"vLLM does not start: {one_line(error, 400)} (rollout.gpu_memory_utilization="
                f"{options.gpu_memory_utilization:g}, max_num_seqs={options.at_once}, "
                f"max_model_len={options.max_model_len})"
            ) from None
        self._unlink_shared_memory()
        self._enter_in_ledger("weights")
        self._enter_in_ledger("kv_cache")
        llm.update_weight_version("0")
        self._count_preemptions(llm)
        return llm

    def _count_preemptions(self, llm: LLM) -> None:
        """Count preemptions in the scheduler, which runs in this process. vLLM's own statistics
        would take time in every step.
        """
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*arguments: object, **options: object) -> object:
            self.slot_steps.preemptions += 1
            return preempt(*arguments, **options)

        scheduler._preempt_request = counted

    def _unlink_shared_memory(self) -> None:
        """Unlink shared memory. On the CPU the ranks of an engine communicate through shared memory
        whose name is the same in all jobs of a machine, and which remains if a job is killed.
        Without a name it still works, and conflicts with no other job.
        """
        size = self.tensor_model_parallel_size
        rank = launched_rank()
        first = rank - rank % size
        name = f"[{'-'.join(str(r) for r in range(first, first + size))}]-cpushm_{rank % size}"
        for path in Path("/dev/shm").glob(f"*-tp:*-{glob.escape(name)}"):
            path.unlink(missing_ok=True)


def drain(engine: LLMEngine) -> None:
    """Step until vLLM has read every batch that it began.

    With asynchronous scheduling, the default on a GPU, a batch is under way while the one before is
    read. So when the last request ends, or is aborted, a batch is left that nobody reads; a reset
    of the prefix cache or sleep would come between its two halves, and the next rollout would fail
    on its remains.
    """
    core = engine.engine_core.engine_core  # type: ignore[attr-defined]
    while core.batch_queue:
        engine.step()


@contextlib.contextmanager
def _errors_of_generation() -> Iterator[None]:
    """Raise an error of vLLM in the block as what it means for the run."""
    try:
        yield
    except (RolloutAbandoned, EngineError, UserError):
        raise
    except ValueError as error:
        raise UserError(f"vLLM refuses a prompt: {one_line(error, 300)}") from None
    except Exception as error:
        if device_failed(error):
            raise
        raise EngineError(f"vLLM failed in generation: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _restart_may_mend(what: str) -> Iterator[None]:
    """Raise an error in the block as :class:`EngineError`, unless the device has failed."""
    try:
        yield
    except Exception as error:
        if device_failed(error):
            raise
        raise EngineError(f"{what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _ends_the_process(what: str) -> Iterator[None]:
    """Raise an error in the block as :class:`DeviceLost`: a new process has the memory that this
    one lacks.
    """
    try:
        yield
    except Exception as error:
        raise DeviceLost(f"{what}: {type(error).__name__}: {one_line(error, 300)}") from error
