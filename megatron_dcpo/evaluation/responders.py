"""Where the responses of an evaluation come from: a model in this process, or a server."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_dcpo import rollout
from megatron_dcpo.config.evaluation_sections import EvaluateConfig
from megatron_dcpo.data import render_prompts
from megatron_dcpo.data.datasets import PromptOptions, message_prompts
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.evaluation.evaluate import Respond, respond_at_once
from megatron_dcpo.evaluation.posthoc import TOP_LOGPROBS
from megatron_dcpo.evaluation.problems import Problems
from megatron_dcpo.evaluation.scoring import parse_kinds
from megatron_dcpo.judging.thinking import KNOWN, check_thinking, keep_thinking
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.rollout import SamplingConfig, VllmOptions, choose_engine
from megatron_dcpo.rollout.engine import check_sampled_model
from megatron_dcpo.rollout.openai_client import Endpoint
from megatron_dcpo.rollout.tokens import check_vocabulary
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.served_models import check_address, served_model
from megatron_dcpo.types import Prompt
from megatron_dcpo.weights import adapter_shape
from megatron_dcpo.weights.architecture import read_architecture
from megatron_dcpo.weights.peft_adapter import merged_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[[Problems], list[Prompt]]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_MANY = 512  # concurrent responses of vLLM on a GPU
_FEW = 64  # and of any other engine


@dataclass(frozen=True)
class Responder:
    """A model that responds: its name, the tokens of its tokenizer as far as they are known, the
    function that renders its prompts, and the function that samples them.
    """

    model: str
    tokens: TokenBytes
    render: Render
    respond: Respond


def sampling_of(config: EvaluateConfig) -> SamplingConfig:
    """Return the sampling options of an evaluation."""
    options = config.evaluation
    return SamplingConfig(
        n=options.samples,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=config.max_tokens,
        seed=options.seed,
        raw_logprobs=True,
        top_logprobs=top_logprobs(config),
    )


def top_logprobs(config: EvaluateConfig) -> int:
    """Return how many of the largest log-probs are requested for every token."""
    options = config.evaluation
    wanted = options.features or "token_entropy" in parse_kinds(options.confidence)
    return TOP_LOGPROBS if wanted else 0


def ask_server(config: EvaluateConfig, date: datetime.date) -> Responder:
    """Return the server at ``endpoint.url`` as a responder.

    With ``endpoint.tokenizer`` the prompts are token ids, in which chat templates write the
    ``date``, otherwise messages. Without it nothing is
    known about the tokens, and ``<think>`` is taken to open the thinking.
    """
    options = config.endpoint
    check_address(options.url)
    tokenizer = None
    tokens = TokenBytes((), KNOWN[0])
    render: Render = partial(_as_messages, config)
    if options.tokenizer:
        tokenizer = rollout.load_tokenizer(options.tokenizer)
        tokens = token_bytes(tokenizer)
        render = partial(as_token_ids, config, tokenizer, date)
    check_thinking(config.data.thinking, tokens.thinking, options.tokenizer)
    api_key = os.environ.get(options.api_key_env) or None
    model = options.model or served_model(options.url, api_key)
    endpoint = Endpoint(
        options.url,
        model,
        sampling_of(config),
        api=_api(config),
        api_key=api_key,
        concurrency=options.concurrency,
        timeout=options.timeout,
        attempts=options.attempts,
        extra_body={**keep_thinking(tokenizer, tokens.thinking), **options.extra_body},
    )
    return Responder(model, tokens, render, endpoint.complete)


def _api(config: EvaluateConfig) -> Literal["chat", "completions"]:
    if config.endpoint.api != "auto":
        return config.endpoint.api
    if config.endpoint.tokenizer or not find_template(config.data.template).chat:
        return "completions"
    return "chat"


def sample_model(
    config: EvaluateConfig, problems: Sequence[Problems], date: datetime.date
) -> Responder:
    """Return the checkpoint at ``model.path``, sampled in this process, as a responder."""
    path = config.model.path
    vocab_size = check_sampled_model(path)
    adapter = config.model.adapter_path
    if adapter:
        adapter_shape.read_shape(Path(adapter), read_architecture(path))
    tokenizer = rollout.load_tokenizer(path)
    tokens = token_bytes(tokenizer)
    check_thinking(config.data.thinking, tokens.thinking, path)
    check_vocabulary(path, tokens, vocab_size)
    render = partial(as_token_ids, config, tokenizer, date)
    longest = 0
    for one in problems:
        for prompt in render(one):
            longest = max(longest, len(prompt.token_ids))
    on_gpu = capabilities().separate_memory
    many = on_gpu and choose_engine(config.rollout.engine, path) == "vllm"
    dtype = config.model.params_dtype
    if dtype == "auto":
        dtype = "bf16" if on_gpu else "fp32"
    options = VllmOptions(
        dtype=_DTYPES[dtype],
        gpu_memory_utilization=0.9 if many else 0.6,
        max_model_len=longest + config.max_tokens,
        max_num_seqs=config.rollout.max_num_seqs or (_MANY if many else _FEW),
        sleep=False,
        raw_logprobs=True,
        seed=config.evaluation.seed,
    )
    engine = rollout.build_local_engine(config.rollout.engine, path, options)
    if adapter:
        # one tensor at a time: the whole model stays where it is
        merged = ([each] for each in merged_tensors(Path(path), Path(adapter)))
        engine.update_weights(merged, version=0)
    stream = partial(engine.stream, sampling=sampling_of(config))
    return Responder(
        model_name(config),
        tokens,
        render,
        respond_at_once(stream, tokens, engine.eos_token_ids),
    )


def model_name(config: EvaluateConfig) -> str:
    """Return what the results call the model that is sampled in this process."""
    if config.model.adapter_path:
        return f"{config.model.path} + {config.model.adapter_path}"
    return config.model.path


def as_token_ids(
    config: EvaluateConfig,
    tokenizer: PreTrainedTokenizerBase,
    date: datetime.date,
    problems: Problems,
) -> list[Prompt]:
    """Return the prompts of a benchmark, rendered as in training by template and tokenizer. Chat
    templates write the ``date``.
    """
    return render_prompts(
        problems.benchmark.records,
        tokenizer,
        PromptOptions(
            template=problems.template or config.data.template,
            limit=config.evaluation.limit or None,
            marker=config.judging.marker,
            thinking=config.data.thinking,
            date=date,
        ),
        source=problems.benchmark.name,
    )


def _as_messages(config: EvaluateConfig, problems: Problems) -> list[Prompt]:
    return message_prompts(
        problems.benchmark.records,
        problems.template or config.data.template,
        config.evaluation.limit or None,
        config.judging.marker,
    )
