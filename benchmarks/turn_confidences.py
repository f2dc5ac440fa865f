"""What does a confidence at every turn cost? Seconds of a rollout of 64 sessions of four turns with
``asks_confidence: turns`` against one that asks at the end alone, in turns in one run.

    python benchmarks/turn_confidences.py         # TURNS_ON=vllm: on vLLM, which caches prefixes

Model and agents are those of ``openai_server.py``: random weights, whose answers and confidences
end at their longest. A confidence has six tokens, which a trained policy writes (a space, a number
and its end), not the 16 that it may have at most.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
from measurement import QUICK, Measurement
from openai_server import AGENT, POLICY, PROMPT_TOKENS, ROUNDS, SESSIONS, engine_of, prompt_ids

from megatron_dcpo.config.sections import AgentsConfig
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout import sessions
from megatron_dcpo.rollout.agents import AgentRollout
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.engine import Engine
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.runtime.distributed import initialize
from megatron_dcpo.runtime.parallel_sizes import ParallelSizes
from megatron_dcpo.types import Prompt, Response

GOAL = 1.25
TURNS = 4
ON_VLLM = os.environ.get("TURNS_ON") == "vllm"
# tokens
if QUICK:
    OF_A_TURN: tuple[int, ...] = (4,)
else:
    OF_A_TURN = (32, 128) if ON_VLLM else (32,)
STATED = 6  # tokens of a confidence
MARKER = "<certainty>"  # several tokens, which random weights do not happen to write
ROOM = 128  # for the confidence at the end


def measurements() -> Iterator[Measurement]:
    torch.set_num_threads(1)
    sessions.CONFIDENCE_TOKENS = STATED
    tokenizer = load_tokenizer(POLICY)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as opened:
        engine: Engine = engine_of(len(tokenizer))
        if ON_VLLM:
            engine = on_vllm(engine, Path(directory) / "model")
        chat = ChatTokens(tokenizer, token_bytes(tokenizer), engine.eos_token_ids)
        agent = Path(directory) / "agent.py"
        agent.write_text(AGENT)
        rollouts = []
        for asks in ("turns", True):
            rollout = AgentRollout(
                engine=engine,
                chat=chat,
                config=AgentsConfig(
                    agent=f"{agent}:run",
                    agent_sessions=SESSIONS,
                    agent_seconds=3600.0,
                    asks_confidence=asks,
                ),
                model="policy",
                sequence_tokens=PROMPT_TOKENS + TURNS * max(OF_A_TURN) + ROOM,
                marker=MARKER,
            )
            rollouts.append(opened.enter_context(closing(rollout)))
        for tokens in OF_A_TURN:
            yield measured(*rollouts, tokens)


def on_vllm(engine: Engine, directory: Path) -> Engine:
    """Return vLLM with the weights of another engine."""
    from megatron_dcpo.rollout.vllm_engine import VllmEngine

    engine.model.save_pretrained(directory)
    load_tokenizer(POLICY).save_pretrained(directory)
    initialize(ParallelSizes())
    options = EngineOptions(
        dtype="fp32",
        max_model_len=PROMPT_TOKENS + TURNS * max(OF_A_TURN) + ROOM,
        max_num_seqs=TURNS * SESSIONS,
        sleep=False,
        arguments={"kv_cache_memory_bytes": 2 << 30, "enforce_eager": True},
    )
    started = VllmEngine(directory, options)
    started.eos_token_ids = ()  # nothing ends before its longest
    return started


def measured(turns: AgentRollout, end: AgentRollout, tokens: int) -> Measurement:
    ours, other = [], []
    is_same = True
    for _ in range(ROUNDS + 1):  # the first warms up
        seconds, branched = timed(turns, tokens)
        ours.append(seconds)
        seconds, plain = timed(end, tokens)
        other.append(seconds)
        for one, two in zip(branched, plain, strict=True):
            said = one.token_ids[one.branch_tokens :]
            is_same &= len(one.branches) == TURNS - 1 and np.array_equal(said, two.token_ids)
    return Measurement(
        name=f"a confidence at every turn of {tokens} tokens",
        ours=float(np.median(ours[1:])),
        other=float(np.median(other[1:])),
        unit="s",
        other_is="one at the end of the session",
        goal=GOAL,
        same=is_same,
        reason="the same tokens behind the branches",
        raw={"ours": ours, "other": other},
    )


def timed(rollout: AgentRollout, tokens: int) -> tuple[float, list[Response]]:
    """Return the seconds of a rollout, and its responses in the order of their prompts."""
    samples = []
    for number in range(SESSIONS):
        name = f"p{number}"
        row = {"calls": TURNS, "tokens": tokens}
        samples.append((Prompt(name, (), prompt_ids(name), "", "t", row=row), 0))
    sampling = SamplingConfig(max_tokens=TURNS * tokens + ROOM, seed=1)
    began = time.perf_counter()
    responses = [one for group in rollout.stream(samples, sampling, 1) for one in group]
    seconds = time.perf_counter() - began
    return seconds, sorted(responses, key=lambda one: int(one.prompt_id[1:]))


if __name__ == "__main__":
    for one in measurements():
        assert one.ours is not None
        assert one.other is not None
        print(
            f"{one.name}: {one.ours:.2f} s, at the end alone {one.other:.2f}, ratio "
            f"{one.ours / one.other:.3f} (goal {GOAL}), same tokens: {one.same}"
        )
