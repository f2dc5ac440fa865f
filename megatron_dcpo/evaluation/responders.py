"""Where the responses of an evaluation come from: a server here, a model in this process in
``local_model.py``. Asking a server needs no torch.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from megatron_dcpo.config.evaluation_sections import EvaluateConfig
from megatron_dcpo.data.datasets import PromptOptions, message_prompts, render_prompts
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.evaluation.evaluate import Respond
from megatron_dcpo.evaluation.posthoc_predictors import TOP_LOGPROBS
from megatron_dcpo.evaluation.problems import Problems
from megatron_dcpo.evaluation.scoring import parse_kinds
from megatron_dcpo.judging.thinking import KNOWN, check_thinking, keep_thinking
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.rollout.openai_client import Endpoint
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.plugins import load_part
from megatron_dcpo.runtime.served_models import check_address, served_model
from megatron_dcpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Render = Callable[[Problems], list[Prompt]]


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
        tokenizer = load_part("megatron_dcpo.rollout.tokens:load_tokenizer")(options.tokenizer)
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


def model_name(config: EvaluateConfig) -> str:
    """Return what the results call the model that is sampled in this process."""
    name = hub.name_of(config.model.path)
    if config.model.adapter_path:
        return f"{name} + {config.model.adapter_path}"
    return name


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
