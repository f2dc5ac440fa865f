"""The Triton kernels of vLLM's Model Runner V2, unchanged, run by Triton's interpreter on the CPU:
what a GPU samples with, beside our output layer's log-probs and exact distributions.

    python -m tests.cuda_wheels.sampler     prints one JSON object: what was compared, by kernel

Of vLLM only the kernels' own files are imported. What they import of the rest launches kernels and
compiles them early; it is replaced here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from megatron_dcpo.policy.output_layer import OutputLayer, token_outputs

ROWS, HIDDEN, VOCABULARY = 12, 64, 3001  # no multiple of a kernel's block
SAMPLES, TOKENS = 400, 24
GPU = "vllm.v1.worker.gpu"


# ---------------------------------------------------------------------- vLLM's files, by themselves
class _Anything:
    def __init__(self, **names: object) -> None:
        self.__dict__.update(names)


def _module(name: str, path: Path | None = None, **names: object) -> None:
    made = ModuleType(name)
    made.__path__ = [str(path)] if path else []
    made.__dict__.update(names)
    sys.modules[name] = made


def _launching(kernel: Any, warmup_inputs: object) -> Callable[..., Any]:
    """vLLM's launcher: what a kernel's function does not name is found among its inputs."""

    def decorate(dispatch: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> None:
            inputs = inspect.signature(dispatch).bind(*args, **kwargs).arguments
            grid, named = dispatch(*args, **kwargs)
            named.pop("num_warps", None)
            for name in kernel.arg_names:
                low = name.lower()
                if name not in named and low in inputs:
                    named[name] = inputs[low]
                elif name not in named:
                    named[name] = inputs[low.removesuffix("_stride_0")].stride(0)
            kernel[grid](**named)

        return launch

    return decorate


def _loops_over_tensors() -> None:
    """A loop's index is a tensor, as in a compiled kernel; the interpreter's is an int."""
    patch = interpreter._patch_lang_core

    def indices(*bounds: Any, **_: object) -> Iterator[Any]:
        for index in range(*(int(bound) for bound in bounds)):
            handle = interpreter.TensorHandle(torch.tensor([index]).int().numpy(), tl.int32)
            yield tl.tensor(handle, tl.int32)

    def patched(lang: Any, *args: Any, **kwargs: Any) -> Any:
        scope = patch(lang, *args, **kwargs)
        lang.range = indices
        return scope

    interpreter._patch_lang_core = patched


def load() -> SimpleNamespace:
    found = find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations
    vllm = Path(found.submodule_search_locations[0])
    _loops_over_tensors()
    for name in ("", "model_executor", "utils", "v1", "v1.sample", "v1.sample.ops", "v1.worker"):
        _module(f"vllm.{name}".rstrip("."), vllm / name.replace(".", "/"))
    for name in ("", ".sample", ".sample.logits_processor"):
        _module(GPU + name, vllm / (GPU + name).removeprefix("vllm.").replace(".", "/"))
    sys.modules["vllm"].__dict__["envs"] = SimpleNamespace()
    _module("vllm.envs")
    _module("vllm.triton_utils", tl=tl, triton=triton, HAS_TRITON=True)
    _module("vllm.sampling_params", SamplingParams=object, MAX_LOGPROB_TOKEN_IDS=128)
    _module("vllm.v1.outputs", LogprobsTensors=_Anything)
    _module(f"{GPU}.buffer_utils", StagedWriteTensor=object, UvaBackedTensor=object)
    interface = ("LogitsContext", "LogitsProcessor", "LogitsProcRequestState")
    _module(f"{GPU}.sample.logits_processor.interface", **dict.fromkeys(interface, object))
    _module("vllm.platforms", current_platform=SimpleNamespace(is_cuda_alike=lambda: True))
    sys.modules["vllm.utils"].__dict__["random_uuid"] = str
    _module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    _module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2, cdiv=triton.cdiv)
    _module("vllm.utils.torch_utils", async_tensor_h2d=torch.tensor)
    _module("vllm.utils.platform_utils", num_compute_units=lambda *_: 4)
    warmup = "vllm.model_executor.warmup"
    _module(warmup)
    choices = {"WarmupChoices": _Anything, "WarmupIntRange": _Anything}
    _module(f"{warmup}.jit_warmup", _when=lambda *_, **__: None, **choices)
    _module(
        f"{warmup}.jit_warmup_triton_helper",
        DispatchSpec=object,
        TritonWarmupTensor=_Anything,
        triton_kernel_dispatcher_with_warmup=_launching,
    )
    return SimpleNamespace(
        gumbel=importlib.import_module(f"{GPU}.sample.gumbel"),
        logprob=importlib.import_module(f"{GPU}.sample.logprob"),
        penalties=importlib.import_module(f"{GPU}.sample.penalties"),
        batch=importlib.import_module(f"{GPU}.input_batch"),
        top=importlib.import_module("vllm.v1.sample.ops.topk_topp_triton"),
    )


# ------------------------------------------------------------------------------ as vLLM's Sampler
def processed(
    vllm: SimpleNamespace, logits: Tensor, temperature: float, k: int | None, p: float | None
) -> Tensor:
    """``Sampler.apply_sampling_params``: an fp32 copy, temperature, top-k and top-p."""
    rows = len(logits)
    logits = logits.float().clone()
    per_row = torch.full((rows,), temperature)
    vllm.gumbel.apply_temperature(logits, torch.arange(rows), per_row)
    if k is None and p is None:
        return logits
    top_k = None if k is None else torch.full((rows,), k, dtype=torch.int32)
    top_p = None if p is None else torch.full((rows,), p)
    masked: Tensor = vllm.top.apply_top_k_top_p_triton(logits, top_k, top_p)
    return masked


def sample(
    vllm: SimpleNamespace, logits: Tensor, temperature: float, seeds: Tensor, pos: Tensor
) -> Tensor:
    """``Sampler._sample_random`` for requests with seeds."""
    rows = len(logits)
    tokens: Tensor = vllm.gumbel.gumbel_sample(
        logits,
        torch.arange(rows),
        torch.full((rows,), temperature),
        seeds,
        pos,
        apply_temperature=False,
        is_drafting=False,
    )
    return tokens


def logprobs(vllm: SimpleNamespace, temperature: float) -> dict[str, Any]:
    """Log-probs and ranks of sampled tokens, beside our output layer's of the same bf16 states."""
    torch.manual_seed(0)
    states = torch.randn(ROWS, HIDDEN).bfloat16()
    weight = (torch.randn(VOCABULARY, HIDDEN) * 0.6).bfloat16()
    logits = states.float() @ weight.float().t()
    seeds = torch.randint(0, 2**62, (ROWS,))
    pos = torch.arange(ROWS) + 1000
    ready = processed(vllm, logits, temperature, None, None)
    tokens = sample(vllm, ready, temperature, seeds, pos)
    scores = vllm.logprob.compute_topk_scores(ready, 4, tokens)
    layer = OutputLayer.of(weight, VOCABULARY, temperature=temperature or 1.0, fp32=True)
    ours = token_outputs(layer, states, tokens).logprobs
    chosen = ready.gather(1, tokens[:, None])
    most = torch.log_softmax(ready.double(), -1).topk(4).values
    return {
        "from ours": (scores.logprobs[:, 0] - ours).abs().max().item(),
        "most probable": (scores.logprobs[:, 1:] - most).abs().max().item(),
        "ranks": bool((scores.selected_token_ranks == (ready >= chosen).sum(1)).all()),
        "greedy": bool((tokens == logits.argmax(-1)).all()),
        "again": bool((sample(vllm, ready, temperature, seeds, pos) == tokens).all()),
        "next position": int((sample(vllm, ready, temperature, seeds, pos + 1) != tokens).sum()),
    }


def reference(logits: Tensor, temperature: float, k: int | None, p: float | None) -> Tensor:
    """The distribution by sorting: top-k, then the fewest tokens that have the probability p."""
    scaled = logits.double() / temperature
    order = scaled.argsort(descending=True)[:k]
    probabilities = torch.softmax(scaled[order], 0)
    before = probabilities.cumsum(0) - probabilities
    kept = order[before < (1.0 if p is None else p)]
    masked = torch.full_like(scaled, -torch.inf)
    masked[kept] = scaled[kept]
    return torch.softmax(masked, 0)


def distribution(
    vllm: SimpleNamespace, temperature: float, k: int | None, p: float | None
) -> dict[str, Any]:
    """Samples of one row by many seeds, beside the distribution; chi2 in standard deviations."""
    torch.manual_seed(1)
    row = torch.randn(TOKENS)
    ready = processed(vllm, row[None], temperature, k, p)
    exact = reference(row, temperature, k, p)
    seeds = torch.randint(-(2**62), 2**62, (SAMPLES,))
    pos = torch.randint(0, 30000, (SAMPLES,))
    many = ready.expand(SAMPLES, TOKENS).contiguous()
    tokens = sample(vllm, many, temperature, seeds, pos)
    counts = torch.bincount(tokens, minlength=TOKENS).double()
    expected = exact * SAMPLES
    common = expected >= 5
    chi2 = ((counts - expected)[common] ** 2 / expected[common]).sum().item()
    freedom = max(1, int(common.sum()) - 1)
    scores = vllm.logprob.compute_topk_scores(many[:8], 0, tokens[:8]).logprobs[:, 0]
    layer = OutputLayer.of(row[:, None].contiguous(), TOKENS, temperature=temperature, fp32=True)
    trained = token_outputs(layer, torch.ones(8, 1), tokens[:8]).logprobs
    mass = torch.softmax(row.double() / temperature, 0)[exact > 0].sum()
    return {
        "kept": int((exact > 0).sum()),
        "same kept": bool((torch.isfinite(ready[0]) == (exact > 0)).all()),
        "outside": int(counts[exact == 0].sum()),
        "chi2": (chi2 - freedom) / (2 * freedom) ** 0.5,
        "logprob": (scores - exact.log()[tokens[:8]]).abs().max().item(),
        "above ours": (scores - trained + mass.log()).abs().max().item(),
    }


def top_p_of_small_batches(vllm: SimpleNamespace, p: float) -> dict[str, Any]:
    """The kernels that divide a row, which vLLM takes on a GPU where no row has a top-k. They find
    the least logit to keep in five rounds of a search, so that a nearly equal one is kept as well.
    """
    torch.manual_seed(2)
    logits = torch.randn(3, VOCABULARY) * 3
    divided = logits.clone()
    vllm.top._apply_topp_split(divided, None, torch.full((3,), p), float("-inf"), 4)
    exact = torch.stack([reference(row, 1.0, None, p) for row in logits])
    whole = processed(vllm, logits, 1.0, None, p)
    least = logits.masked_fill(exact == 0, torch.inf).amin(1, keepdim=True)
    distances = (logits - least)[torch.isfinite(divided) != (exact > 0)]
    return {
        "divided": distances.tolist(),
        "whole": int((torch.isfinite(whole) != (exact > 0)).sum()),
    }


def penalties(vllm: SimpleNamespace) -> dict[str, Any]:
    """Request 0 has none, as all of ours; request 1 has all three, beside their formula."""
    torch.manual_seed(3)
    words = triton.cdiv(VOCABULARY, 32)
    all_tokens = torch.tensor([[5, 6, 7, 7, 7], [5, 6, 7, 7, 40]], dtype=torch.int32)
    lengths = {"prompt_len": torch.tensor([3, 3]), "prefill_len": torch.tensor([5, 5])}
    in_prompt = torch.zeros(2, words, dtype=torch.int32)
    counts = torch.zeros(2, VOCABULARY, dtype=torch.int32)
    index = torch.arange(2)
    vllm.penalties.bincount(
        index, all_tokens, *lengths.values(), in_prompt, counts, max_prefill_len=5
    )
    logits = torch.randn(2, VOCABULARY)
    changed = logits.clone()
    repetition, frequency, presence = [1.0, 1.5], [0.0, 0.25], [0.0, 0.5]
    vllm.penalties.apply_penalties(
        changed,
        index,
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        *(torch.tensor(values) for values in (repetition, frequency, presence)),
        in_prompt,
        counts,
    )
    expected = logits[1].clone()
    for token in (5, 6, 7, 40):
        expected[token] *= 1 / 1.5 if expected[token] > 0 else 1.5
    for token in (7, 40):
        expected[token] -= 0.25 + 0.5
    return {
        "none": bool(torch.equal(changed[0], logits[0])),
        "all": (changed[1] - expected).abs().max().item(),
        "counts": counts[1].nonzero()[:, 0].tolist(),
    }


def input_batch(vllm: SimpleNamespace) -> dict[str, Any]:
    """A step with a decode (state 2, five tokens known), the first part of a prompt (state 0) and a
    prompt's end (state 1), as model_runner.py prepares it and takes its tokens.
    """
    batch = vllm.batch
    states = torch.tensor([2, 0, 1])
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    all_tokens = torch.arange(32, dtype=torch.int32).reshape(4, 8).clone()
    prefill = torch.tensor([6, 4, 3, 0], dtype=torch.int32)
    computed = torch.tensor([0, 2, 4, 0], dtype=torch.int32)
    total = torch.tensor([6, 4, 5, 0], dtype=torch.int32)
    last = torch.tensor([[0], [0], [99], [0]])
    ids = torch.zeros(6, dtype=torch.int32)
    positions = torch.zeros(6, dtype=torch.int64)
    lengths = torch.full((5,), 7, dtype=torch.int32)
    following = torch.zeros(1, 4, dtype=torch.int32)
    cut = torch.arange(4, dtype=torch.int32)
    batch.prepare_prefill_inputs(ids, following, states, starts, all_tokens, prefill, computed)
    batch.prepare_pos_seq_lens(states, starts, computed, positions, lengths)
    drafts = torch.zeros(4, 0, dtype=torch.int64)
    where = batch.combine_sampled_and_draft_tokens(
        ids, states, last, starts, lengths, prefill, drafts, cut, 3
    )
    expanded, local = batch.expand_idx_mapping(states, 3, cut, 1)
    sampled, rejected = batch.get_num_sampled_and_rejected(
        torch.ones(3, dtype=torch.int32), lengths, cut, states, prefill
    )
    tokens = torch.tensor([[51], [52], [53]])
    batch.post_update(
        states, computed, last, None, tokens, sampled, rejected, starts, all_tokens, total
    )
    return {
        "ids": ids.tolist(),
        "positions": positions.tolist(),
        "lengths": lengths.tolist(),
        "logits": where.tolist(),
        "states": expanded.tolist(),
        "local": local.tolist(),
        "sampled": sampled.tolist(),
        "rejected": rejected.tolist(),
        "computed": computed.tolist(),
        "total": total.tolist(),
        "last": last[:, 0].tolist(),
        "new": [all_tokens[2, 5].item(), all_tokens[1, 4].item()],
    }


LOGPROBS = {"1": 1.0, "0.7": 0.7, "greedy": 0.0}
DISTRIBUTIONS: dict[str, tuple[float, int | None, float | None]] = {
    "temperature 1": (1.0, None, None),
    "temperature 0.7": (0.7, None, None),
    "top-p": (1.0, None, 0.8),
    "top-k": (0.7, 5, None),
    "both": (0.7, 12, 0.8),
}
TOP_P = (0.5, 0.95)


def main() -> None:
    torch.set_num_threads(1)
    vllm = load()
    found: dict[str, Any] = {}
    for name, temperature in LOGPROBS.items():
        found[f"logprobs {name}"] = logprobs(vllm, temperature)
    for name, options in DISTRIBUTIONS.items():
        found[name] = distribution(vllm, *options)
    for p in TOP_P:
        found[f"small batches {p}"] = top_p_of_small_batches(vllm, p)
    found["penalties"] = penalties(vllm)
    found["input batch"] = input_batch(vllm)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
