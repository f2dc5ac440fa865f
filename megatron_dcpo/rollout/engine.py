"""What an engine is: it samples responses, and it takes new weights piece by piece. Which one
``auto`` means here; and random numbers of one sample, the same for any batching, resumption or
split over ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from megatron_dcpo.architectures.config_json import (
    Architecture,
    check_model_dir,
    is_known,
    read_architecture,
)
from megatron_dcpo.architectures.keys import check_unquantized
from megatron_dcpo.errors import UserError, pip_install
from megatron_dcpo.rollout.arrivals import Arrivals
from megatron_dcpo.rollout.sampling import Samples, SamplingConfig, digest_of
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.types import Prompt, Response, ResponseKey
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.planner import WeightSlice

# removed after vLLM 0.23
_NOT_IN_VLLM = ("dots1",)
# run by transformers' modules, whose gate_up_proj takes no gate_proj and up_proj
_FUSED_IN_VLLM = ("glm",)
# no released model of it does
_NOT_TIED_IN_VLLM = ("glm4_moe",)


@dataclass(frozen=True)
class PartialRollout:
    """A rollout that ends before its last response. ``should_stop``: asked between two steps of the
    engine whether it does now. ``unfinished``: what an earlier one left, by prompt id and index:
    continued after its tokens.
    """

    should_stop: Callable[[], bool]
    unfinished: Mapping[ResponseKey, Response]

    def so_far(self, prompt: Prompt, index: int) -> Response | None:
        return self.unfinished.get((prompt.prompt_id, index))


@dataclass
class SlotSteps:
    """Decoding positions of an engine, added up over its steps: those there were, and those that
    gave a token. ``preemptions``: how often a response lost its place in the cache to another and
    was computed again.
    """

    total: int = 0
    used: int = 0
    preemptions: int = 0


class EngineError(RuntimeError):
    """An engine failed, and a restart may help; what it was doing has to be done again."""


class Engine(Protocol):
    """A rollout engine. ``weights_version`` counts the updates received and is stamped on every
    response.

    An engine of several ranks (``tensor_model_parallel_size``) is called alike on each of them and
    answers alike.
    """

    weights_version: int
    eos_token_ids: tuple[int, ...]
    tensor_model_parallel_size: int
    slot_steps: SlotSteps | None = None  # if the engine knows them

    def stream(
        self,
        samples: Samples,
        sampling: SamplingConfig,
        step: int = 0,
        partial: PartialRollout | None = None,
    ) -> Generator[list[Response], None, None]:
        """Yield the response of every (prompt, sample index), handed over when it is finished, with
        those that finish together.

        A response depends on its prompt, the weights, the seed, the step and its index only, not on
        what else is sampled. How many run at once is up to the engine. With ``partial``, as soon
        as that is full, everything else comes as it is, with ``finish_reason`` ``abort`` and
        perhaps no token; what is continued keeps the random numbers of the step it began in, so
        that with the same weights it is what it would have been.

        Raises :class:`megatron_dcpo.runtime.signals.RolloutAbandoned` soon after
        ``signals.stop_requested()`` turns true, and :class:`EngineError`; what was handed over
        before stands.
        """
        ...

    def serve(
        self, arrivals: Arrivals, sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        """Sample the calls that arrive until ``arrivals`` is closed. Yield after every step of the
        engine, and now and then while it waits, the responses that are finished: often none.

        A response depends on its call, the weights, the seed and the step only, as in
        :meth:`stream`. A call that is cancelled gets none. Raises what :meth:`stream` raises.
        """
        raise UserError(
            f"{type(self).__name__} takes no calls that arrive while it runs, which "
            "rollout.agent and rollout.command need; choose another rollout.engine"
        )

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, step: int = 0
    ) -> list[Response]:
        """Run :meth:`stream` to its end: ``sampling.n`` responses per prompt, prompt-major."""
        samples = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        finished = {
            (response.prompt_id, response.sample_index): response
            for responses in self.stream(samples, sampling, step)
            for response in responses
        }
        return [finished[prompt.prompt_id, index] for prompt, index in samples]

    def update_weights(self, buckets: Iterable[Sequence[WeightSlice]], version: int) -> None:
        """Overwrite the engine's weights, bucket by bucket; complete when it returns. Wakes a
        sleeping engine.

        The values of a bucket are the caller's and valid until the next one is asked for.
        """
        ...

    def forget_prompts(self) -> None:
        """Drop what is kept of earlier prompts, so that what comes next is computed as if they had
        not been.
        """
        return

    def sleep(self) -> None:
        """Give back the memory that the next weights and prompts will fill again, if the engine
        can.
        """
        ...

    def restart(self) -> None:
        """Restart after an :class:`EngineError`. The weights have to be updated before the next
        ``generate``.
        """
        ...


def check_sampled_model(model_dir: str | Path) -> int:
    """Return the number of embeddings of a model that is sampled and not trained. Raises
    :class:`UserError` if it is not the model that its ``config.json`` describes, as far as this is
    known: an architecture that only transformers has is trusted to it.
    """
    check_model_dir(model_dir)
    path = Path(model_dir) / "config.json"
    config = read_json_object(path)
    check_unquantized(config, str(path))
    if is_known(config):
        arch = read_architecture(model_dir)
        HFReader(model_dir, arch).check(arch)
        return arch.vocab_size
    size = config.get("vocab_size")
    if size is None and isinstance(config.get("text_config"), dict):
        size = config["text_config"].get("vocab_size")
    if type(size) is not int:
        raise UserError(f"{path}: vocab_size must be a count, not {size!r:.40}")
    return size


logger = logging.getLogger(__name__)


def choose_engine(choice: str, model_dir: str | Path) -> Literal["vllm", "transformers"]:
    """Return the engine's name: ``auto`` takes vLLM on a GPU if it is installed and can run the
    model, and says so when it cannot. Without a GPU transformers samples as fast, starts sooner and
    takes less memory (docs/engines.md).

    Raises :class:`UserError` when vLLM is asked for and cannot be used.
    """
    if choice == "transformers" or (choice == "auto" and not capabilities().separate_memory):
        return "transformers"
    reason = (
        f"vLLM is not installed (on a GPU: {pip_install('vllm')}; without one: make setup-engine)"
    )
    if find_spec("vllm") is not None:
        try:
            reason = unsupported(read_architecture(model_dir))
        except UserError as error:  # a model of another kind, which transformers may know
            reason = str(error)
    if not reason:
        return "vllm"
    if choice == "vllm":
        raise UserError(
            f"the vLLM engine cannot be used: {reason}; take the transformers engine instead"
        )
    logger.info("engine auto: transformers, because %s", reason)
    return "transformers"


def unsupported(arch: Architecture) -> str:
    """Return why vLLM, installed, cannot run ``arch`` here; empty if it can. Does not import vLLM,
    which takes seconds.
    """
    if arch.name in _NOT_IN_VLLM:
        return f"vLLM has no {arch.name} any more"
    if arch.name in _FUSED_IN_VLLM:
        return f"vLLM runs {arch.name} by a module that takes no update of gate or up alone"
    if arch.name in _NOT_TIED_IN_VLLM and arch.tied_embeddings:
        return f"vLLM does not tie the embeddings of {arch.name}"
    multiple = capabilities().expert_hidden_multiple
    if arch.num_experts and arch.hidden_size % multiple:
        return (
            f"vLLM's experts need a hidden_size that is a multiple of {multiple} (it is "
            f"{arch.hidden_size})"
        )
    sizes = capabilities().attention_head_sizes
    if sizes is not None and arch.kv_channels not in sizes:
        return f"vLLM's attention on the CPU has no head_dim {arch.kv_channels} (it has {sizes})"
    return ""


def append_segment(begun: Response | None, new: Response) -> Response:
    """Return ``new`` appended to the tokens that were there before."""
    if begun is None:
        return new
    before = begun.segments or ((begun.weights_version, len(begun.token_ids)),)
    return replace(
        new,
        token_ids=np.concatenate([begun.token_ids, new.token_ids]),
        logprobs=np.concatenate([begun.logprobs, new.logprobs]),
        step=begun.step,
        segments=tuple(
            part for part in (*before, (new.weights_version, len(new.token_ids))) if part[1]
        ),
    )


def uniforms(seed: int, step: int, prompt_id: str, sample_index: int, count: int) -> np.ndarray:
    """Return float64 [count] uniform numbers in [0, 1), counted (Philox): a longer ``count`` begins
    with the same ones.
    """
    key = np.frombuffer(digest_of(16, seed, step, prompt_id, sample_index), np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def request_seed(seed: int, step: int, prompt_id: str, index: int, begun: int = 0) -> int:
    """Return a seed of 62 bits, for an engine that draws its own numbers, another seed after
    ``begun`` tokens.
    """
    if begun:
        digest = digest_of(8, seed, step, prompt_id, index, begun)
    else:
        digest = digest_of(8, seed, step, prompt_id, index)
    return int.from_bytes(digest, "little") >> 2
