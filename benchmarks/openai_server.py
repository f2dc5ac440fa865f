"""What do sessions of agents cost? Seconds per token of 64 agents at once against the
engine's own stream of the same prompts, in turns in one run.

    python benchmarks/openai_server.py

The model has random weights in the shape of Qwen3 with 8 layers of 384, in this process; an agent
is a process of its own with OpenAI's client. A session is one call of 128 tokens; of the second
measurement four calls of 32 tokens each, and the stream beside it samples the same four prompts of
every session one after the other, with their histories. Nothing ends before its last token.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from measurement import QUICK, REPOSITORY, Measurement
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_dcpo.config.sections import AgentsConfig
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.agents import AgentRollout
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.types import Prompt, Response

GOAL = 1.1
SESSIONS = 8 if QUICK else 64
TOKENS = 16 if QUICK else 128  # of a session
ROUNDS = 1 if QUICK else 2
LAYERS, HIDDEN = (2, 64) if QUICK else (8, 384)
PROMPT_TOKENS = 32
POLICY = REPOSITORY / "examples" / "quickstart" / "policy"
AGENT = """
async def run(problem, client):
    text = problem["prompt"]
    calls, tokens = problem["row"]["calls"], problem["row"]["tokens"]
    for _ in range(calls):
        reply = await client.completions.create(model="x", prompt=text, max_tokens=tokens)
        text += reply.choices[0].text
"""


def measurements() -> Iterator[Measurement]:
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(POLICY)
    engine = engine_of(len(tokenizer))
    chat = ChatTokens(tokenizer, token_bytes(tokenizer), engine.eos_token_ids)
    with tempfile.TemporaryDirectory() as directory:
        agent = Path(directory) / "agent.py"
        agent.write_text(AGENT)
        rollout = AgentRollout(
            engine=engine,
            chat=chat,
            config=AgentsConfig(
                agent=f"{agent}:run",
                agent_sessions=SESSIONS,
                agent_seconds=3600.0,
                agent_calls=8,
                asks_confidence=False,
            ),
            model="policy",
            sequence_tokens=PROMPT_TOKENS + TOKENS,
            marker="<conf>",
        )
        with closing(rollout):
            for calls in (1, 4):
                yield measured(rollout, calls)


def engine_of(vocabulary: int) -> TransformersEngine:
    """Return an engine whose responses end at their longest."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64,
        head_dim=64,
    )
    return TransformersEngine(Qwen3ForCausalLM(config), eos_token_ids=(-1,), max_num_seqs=SESSIONS)


def measured(rollout: AgentRollout, calls: int) -> Measurement:
    samples = [(prompt(number, calls), 0) for number in range(SESSIONS)]
    sampling = SamplingConfig(max_tokens=TOKENS, seed=1)
    ours, other = [], []
    for _ in range(ROUNDS + 1):  # the first warms up
        began = time.perf_counter()
        responses = [one for group in rollout.stream(samples, sampling, 1) for one in group]
        ours.append((time.perf_counter() - began) / tokens_of(responses))
        other.append(stream_seconds(rollout.engine, responses, calls))
    return Measurement(
        name=f"agents, {calls} calls a session" if calls > 1 else "agents, a call a session",
        ours=1e6 * float(np.median(ours[1:])),
        other=1e6 * float(np.median(other[1:])),
        unit="us/token",
        other_is="the engine's own stream of the same calls",
        goal=GOAL,
        same=all(one.failure is None for one in responses),
        raw={"ours": ours, "other": other},
    )


def stream_seconds(engine: TransformersEngine, responses: Sequence[Response], calls: int) -> float:
    """Return the seconds per token of the same calls as the engine's own stream, each with the
    history that its session had.
    """
    per_call = TOKENS // calls
    seconds = 0.0
    for number in range(calls):
        samples = []
        for one in responses:
            history = one.token_ids[: number * per_call].tolist()
            ids = (*prompt_ids(one.prompt_id), *history)
            samples.append((Prompt(one.prompt_id, (), ids, "", "t"), 0))
        sampling = SamplingConfig(max_tokens=per_call, seed=1)
        began = time.perf_counter()
        made = [one for group in engine.stream(samples, sampling, 1) for one in group]
        seconds += time.perf_counter() - began
        assert tokens_of(made) == per_call * len(responses)
    return seconds / (TOKENS * len(responses))


def prompt(number: int, calls: int) -> Prompt:
    return Prompt(
        prompt_id=f"p{number}",
        messages=(),
        token_ids=prompt_ids(f"p{number}"),
        ground_truth="",
        task="t",
        row={"calls": calls, "tokens": TOKENS // calls},
    )


def prompt_ids(name: str) -> tuple[int, ...]:
    """Return digits: ordinary tokens of this tokenizer."""
    drawn = np.random.default_rng(int(name[1:])).integers(4, 14, PROMPT_TOKENS)
    return tuple(drawn.tolist())


def tokens_of(responses: Sequence[Response]) -> int:
    return sum(len(one.token_ids) for one in responses)


if __name__ == "__main__":
    for one in measurements():
        assert one.ours is not None
        assert one.other is not None
        print(
            f"{one.name}: {one.ours:.1f} us/token, the engine's own stream {one.other:.1f}, ratio "
            f"{one.ours / one.other:.3f} (goal {GOAL})"
        )
