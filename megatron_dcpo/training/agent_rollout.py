"""Agents as the rollout of a run: built where a configuration names one."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megatron_dcpo.config import Config
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.agents import AgentRollout
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.engine import Engine
from megatron_dcpo.runtime import hub
from megatron_dcpo.training.provenance import date_of


def build_agent_rollout(
    config: Config,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    sequence_tokens: int,
) -> AgentRollout:
    """Return what runs agents beside this rank's engine. A session may have
    ``sequence_tokens`` tokens, prompt and responses.
    """
    chat = ChatTokens(
        tokenizer=tokenizer,
        tokens=token_bytes(tokenizer),
        eos_ids=tuple(engine.eos_token_ids),
        thinking=config.data.thinking,
        date=date_of(config),
    )
    return AgentRollout(
        engine=engine,
        chat=chat,
        config=config.rollout,
        model=hub.name_of(config.model.path),
        sequence_tokens=sequence_tokens,
        marker=config.judging.marker,
    )
