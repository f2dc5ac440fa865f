"""A model that an evaluation samples in this process."""

from __future__ import annotations

import atexit
import datetime
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config.evaluation_sections import EvaluateConfig
from megatron_dcpo.evaluation.evaluate import Stream, respond_at_once
from megatron_dcpo.evaluation.problems import Problems
from megatron_dcpo.evaluation.responders import Responder, as_token_ids, model_name, sampling_of
from megatron_dcpo.judging.thinking import check_thinking
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.agents import AgentRollout
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.engine import Engine
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.local_engine import (
    build_local_engine,
    check_sampled_model,
    choose_engine,
)
from megatron_dcpo.rollout.sampling import Samples
from megatron_dcpo.rollout.tokens import check_vocabulary, load_tokenizer
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.types import Response
from megatron_dcpo.weights import adapter_shape
from megatron_dcpo.weights.peft_adapter import merged_tensors

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_MANY = 512  # concurrent responses of vLLM on a GPU
_FEW = 64  # and of any other engine


def sample_model(
    config: EvaluateConfig, problems: Sequence[Problems], date: datetime.date
) -> Responder:
    """Return the checkpoint at ``model.path``, sampled in this process, as a responder."""
    path = config.model.path
    vocab_size = check_sampled_model(path)
    adapter = config.model.adapter_path
    if adapter:
        adapter_shape.read_shape(Path(adapter), read_architecture(path))
    tokenizer = load_tokenizer(path)
    tokens = token_bytes(tokenizer)
    check_thinking(config.data.thinking, tokens.thinking, path)
    check_vocabulary(path, tokens, vocab_size)
    render = partial(as_token_ids, config, tokenizer, date)
    prompts = [prompt for one in problems for prompt in render(one)]
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
    on_gpu = capabilities().separate_memory
    many = on_gpu and choose_engine(config.rollout.engine, path) == "vllm"
    options = EngineOptions(
        dtype=_DTYPES[element_type(config)],
        gpu_memory_utilization=0.9 if many else 0.6,
        max_model_len=longest + config.max_tokens,
        max_num_seqs=config.rollout.max_num_seqs or (_MANY if many else _FEW),
        sleep=False,
        raw_logprobs=True,
        seed=config.evaluation.seed,
    )
    engine = build_local_engine(config.rollout.engine, path, options)
    _add_adapter(engine, config)
    stream: Stream = partial(engine.stream, sampling=sampling_of(config))
    if config.rollout.runs_agents:
        chat = ChatTokens(
            tokenizer=tokenizer,
            tokens=tokens,
            eos_ids=tuple(engine.eos_token_ids),
            thinking=config.data.thinking,
            date=date,
        )
        agents = AgentRollout(
            engine=engine,
            chat=chat,
            config=config.rollout,
            model=model_name(config),
            sequence_tokens=longest + config.max_tokens,
            marker=config.judging.marker,
        )
        stream = _agents(config, agents)
    return Responder(
        model_name(config), tokens, render, respond_at_once(stream, tokens, engine.eos_token_ids)
    )


def _agents(config: EvaluateConfig, agents: AgentRollout) -> Stream:
    """Return what runs the agents of an evaluation. A session that fails is left out: the same
    command tries it again.
    """
    atexit.register(agents.close)

    def stream(samples: Samples) -> Iterator[list[Response]]:
        for together in agents.stream(samples, sampling_of(config)):
            yield [one for one in together if one.failure is None]

    return stream


def element_type(config: EvaluateConfig) -> str:
    """Return the element type of the parameters, ``fp32`` or ``bf16``."""
    if config.model.params_dtype != "auto":
        return config.model.params_dtype
    return "bf16" if capabilities().separate_memory else "fp32"


def _add_adapter(engine: Engine, config: EvaluateConfig) -> None:
    """Merge the adapter that is evaluated, if any, into the model of an engine."""
    adapter = config.model.adapter_path
    if not adapter:
        return
    # one tensor at a time: the whole model stays where it is
    merged = ([each] for each in merged_tensors(Path(config.model.path), Path(adapter)))
    engine.update_weights(merged, version=0)
