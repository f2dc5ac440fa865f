"""Agents make the responses: each runs as its author wrote it, in a process of its own, with the
policy as its OpenAI endpoint (:mod:`megatron_dcpo.rollout.openai_server`).

A failed session is dropped from its group; it never counts as wrong, and its
:attr:`Response.failure` says why. One whose agent ends after a call was refused because its budget
is used up is truncated.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import queue
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from megatron_dcpo.config.sections import AgentsConfig
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.judging.verdicts import checked_result
from megatron_dcpo.rollout.arrivals import Arrivals
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.engine import Engine
from megatron_dcpo.rollout.openai_server import PolicyEndpoint
from megatron_dcpo.rollout.sampling import Samples, SamplingConfig, sample_seed
from megatron_dcpo.rollout.sessions import Session, SessionLimits, failed
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.brought import HASH_SEED
from megatron_dcpo.runtime.text import parse_json, printable
from megatron_dcpo.types import Prompt, Response, ResponseKey

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
_REASONS_SHOWN = 8  # of sessions that fail, in a run
_KILL_SECONDS = 10.0  # for the process that starts agents to end one, or itself
_HAS_ENDED = "the process that starts agents has ended"
# Writable memory of each process of a session, so that one that leaks ends before the host's does.
MEMORY_BYTES = 4 << 30
_HOST = Path(__file__).with_name("agent_host.py")
# runs a file as a program that finds modules in the working directory, and none beside it
_RUNS_FILE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


class AgentRollout:
    """Runs agents on the samples of a rollout; the endpoint and the processes running until
    :meth:`close`. Sessions are tasks on the endpoint's event loop, beside the thread that has the
    engine. ``sequence_tokens`` is the longest sequence that the engine takes; ``marker`` opens a
    confidence.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokens,
        config: AgentsConfig,
        model: str,
        sequence_tokens: int,
        marker: str,
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.config = config
        self.sequence_tokens = sequence_tokens
        self.marker = marker
        self.host = AgentHost(
            name=option_of(config), words=words_of(config), seconds=config.agent_seconds
        )
        self.endpoint = PolicyEndpoint(chat, model)
        self._reasons: set[str] = set()
        try:
            self.endpoint.run(self.host.start())
        except BaseException:
            self.endpoint.close()
            raise

    def close(self) -> None:
        """End the processes and the endpoint."""
        self.endpoint.run(self.host.close())
        self.endpoint.close()

    def stream(
        self, samples: Samples, sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        """Yield the response of every (prompt, index) when its session has ended. Raises what
        :meth:`Engine.serve` raises.
        """
        arrivals = Arrivals()
        self.endpoint.arrivals = arrivals
        sessions = _Sessions(self, arrivals, sampling, step)
        self.endpoint.run(sessions.start(samples))
        try:
            with closing(self.engine.serve(arrivals, sampling, step)) as served:
                for responses in served:
                    self.endpoint.deliver(responses)
                    finished = sessions.take_finished()
                    if finished:
                        yield finished
            finished = sessions.take_finished()
            if finished:
                yield finished
        finally:
            self.endpoint.arrivals = None
            self.endpoint.run(sessions.give_up())

    def warn(self, key: ResponseKey, why: str) -> None:
        """Log the first session of a run that fails for a reason; the others are counted."""
        if why in self._reasons or len(self._reasons) == _REASONS_SHOWN:
            return
        self._reasons.add(why)
        logger.warning(
            "%s: response %d to %s: %s; it is left out, as are others that fail, and counted in "
            "rollout/unjudged",
            option_of(self.config),
            key[1],
            key[0],
            printable(why)[:400],
        )


class _Sessions:
    """The sessions of one rollout, a task for each."""

    def __init__(
        self, rollout: AgentRollout, arrivals: Arrivals, sampling: SamplingConfig, step: int
    ) -> None:
        self.rollout = rollout
        self.arrivals = arrivals
        self.sampling = sampling
        self.step = step
        self._agents = asyncio.Semaphore(rollout.config.agent_sessions)
        self._tasks: set[asyncio.Task[Response]] = set()
        self._finished: queue.SimpleQueue[asyncio.Task[Response]] = queue.SimpleQueue()

    async def start(self, samples: Samples) -> None:
        """Start the sessions. The engine is told that no call comes any more when all are over."""
        for prompt, index in samples:
            task = asyncio.create_task(self._respond(prompt, index))
            self._tasks.add(task)
            task.add_done_callback(self._is_over)
        if not self._tasks:
            self.arrivals.close()

    def take_finished(self) -> list[Response]:
        """Return the responses of sessions that are over now. Raises what ended one otherwise."""
        finished = []
        while not self._finished.empty():
            finished.append(self._finished.get().result())
        return finished

    async def give_up(self) -> None:
        """End what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_over(self, task: asyncio.Task[Response]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._finished.put(task)
        if self._tasks:
            self.arrivals.wake()
        else:
            self.arrivals.close()

    async def _respond(self, prompt: Prompt, index: int) -> Response:
        """Return what becomes of a session: its agent runs, its calls become the response, and the
        policy states its confidence.
        """
        limits = SessionLimits(
            response_tokens=self.sampling.max_tokens,
            sequence_tokens=self.rollout.sequence_tokens,
            calls=self.rollout.config.agent_calls,
        )
        session = Session(prompt=prompt, index=index, chat=self.rollout.chat, limits=limits)
        async with self._agents:
            outcome = await self._run_agent(session)
        why, verdict = verdict_of(outcome)
        if why and session.is_out_of_budget:
            why, verdict = "", None
        if not why and not session.turns:
            why = "it has never asked the policy"
        if why:
            self.rollout.warn((prompt.prompt_id, index), why)
            version = self.rollout.engine.weights_version
            return failed(prompt, index, why, version, self.step)
        await self._ask_confidences(session)
        return session.response(verdict)

    async def _ask_confidences(self, session: Session) -> None:
        """Have the policy state the confidences of a session that is over, all at once."""
        asks, marker = self.rollout.config.asks_confidence, self.rollout.marker
        last = session.ask_confidence(marker) if asks else None
        earlier = session.ask_earlier_confidences(marker) if asks == "turns" else []
        planned = [last, *earlier] if last is not None else earlier
        # each has one choice; an engine may run once what their prompts have in common
        answers = await self.rollout.endpoint.sample(session, *planned) if planned else []
        for one, stated in zip(planned, answers, strict=True):
            if one is last:
                session.add_confidence(one, stated)
            else:
                session.add_earlier_confidence(one, stated, marker)

    async def _run_agent(self, session: Session) -> Mapping[str, Any]:
        """Return the outcome of an agent, while whose process runs the session takes calls."""
        endpoint = self.rollout.endpoint
        key = endpoint.open(session)
        try:
            return await self.rollout.host.run(
                problem=self._problem(session.prompt, session.index),
                base_url=f"{endpoint.url}/s/{key}/v1",
                api_key=key,
            )
        finally:
            endpoint.seal(key)

    def _problem(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """Return what an agent gets."""
        return {
            "id": prompt.prompt_id,
            "index": index,
            "messages": list(prompt.messages),
            "prompt": self.rollout.chat.text_of(prompt.token_ids),
            "problem": prompt.problem,
            "answer": prompt.ground_truth,
            "task": prompt.task,
            "row": dict(prompt.row) if prompt.row else None,
            "seed": sample_seed(self.sampling.seed + self.step, prompt.prompt_id, index),
        }


def verdict_of(outcome: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Return why a session has failed, "" if it has not, and the verdict that it gave, if it gave
    one.
    """
    if "error" in outcome:
        return str(outcome["error"]) or "it failed", None
    value = outcome.get("value")
    if value is None:
        return "", None
    why, verdict = checked_result(value)
    return (why, None) if why is not None else ("", verdict)


def option_of(config: AgentsConfig) -> str:
    """Return the option that names what runs, for messages."""
    if config.agent:
        return f"rollout.agent={config.agent}"
    return f"rollout.command={config.command}"


def words_of(config: AgentsConfig) -> tuple[str, ...]:
    """Return the words that start the process that starts sessions."""
    python = config.agent_python or sys.executable
    kind = "agent" if config.agent else "command"
    limit = ("--memory", f"{MEMORY_BYTES}")
    return (
        python,
        "-c",
        _RUNS_FILE,
        str(_HOST),
        *limit,
        "--",
        kind,
        config.agent or config.command,
    )


class AgentHost:
    """The process that starts sessions (``agent_host.py``). It is started again if it has ended, or
    does not end a session that is out of time: a session waits for nothing else than its outcome,
    its deadline, and the end of this process. ``name`` is that of what runs, ``words`` start the
    process.
    """

    def __init__(self, name: str, words: Sequence[str], seconds: float) -> None:
        self.name = name
        self.words = words
        self.seconds = seconds
        self._process: _HostProcess | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)

    async def start(self) -> _HostProcess:
        """Return a process that is ready. Raises :class:`UserError` if the agent cannot be
        loaded.
        """
        async with self._starting:
            if self._process is None or self._process.is_over:
                self._process = await _started(self.name, self.words)
            return self._process

    async def run(
        self, problem: Mapping[str, Any], base_url: str, api_key: str
    ) -> Mapping[str, Any]:
        """Return the outcome of an agent, ``value`` or ``error``."""
        process = await self.start()
        number = next(self._numbers)
        outcome = process.outcome_of(number)
        process.say({"id": number, "problem": problem, "base_url": base_url, "api_key": api_key})
        try:
            await asyncio.wait((outcome,), timeout=self.seconds)
        finally:
            if not outcome.done():
                process.say({"kill": number})
        if outcome.done():
            return outcome.result()
        await asyncio.wait((outcome,), timeout=_KILL_SECONDS)
        if not outcome.done():
            process.end("the process that starts agents does not answer")
            return outcome.result()
        return {"error": f"it took more than {self.seconds:g} seconds"}

    async def close(self) -> None:
        """End all agents."""
        if self._process is not None:
            await self._process.close()


class _HostProcess:
    """A process that starts sessions, from its first to its last. ``is_over``: it says nothing any
    more, whatever may be left of it.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.is_over = False
        self._process = process
        self._live: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._listening: asyncio.Task[None] | None = None

    async def first_word(self) -> Mapping[str, Any]:
        """Return whether the agent was loaded, ``ready`` or ``error``; listen from then on."""
        try:
            async with asyncio.timeout(_START_SECONDS):
                _, said = await self._said()
        except (TimeoutError, EOFError, ValueError):
            said = {}
        if said.get("ready"):
            self._listening = asyncio.create_task(self._listen())
        else:
            self.end("")
        return said

    def outcome_of(self, number: int) -> asyncio.Future[Mapping[str, Any]]:
        """Return the outcome of a session that is about to be started."""
        outcome = asyncio.get_running_loop().create_future()
        if self.is_over:
            outcome.set_result({"error": _HAS_ENDED})
        else:
            self._live[number] = outcome
        return outcome

    def say(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order, default=str).encode() + b"\n")

    def end(self, why: str) -> None:
        """End the process, with the sessions that it has."""
        self.is_over = True
        for outcome in self._live.values():
            outcome.set_result({"error": why})
        self._live.clear()
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Have the process end its sessions, and itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await self._process.wait()
        self.end(_HAS_ENDED)
        await self._process.wait()

    async def _listen(self) -> None:
        """Take what the process says; whatever ends this ends the process."""
        try:
            while True:
                number, outcome = await self._said()
                waiting = self._live.pop(number, None)
                if waiting is not None:
                    waiting.set_result(outcome)
        except (EOFError, ValueError):
            pass
        finally:
            self.end(_HAS_ENDED)

    async def _said(self) -> tuple[int, Mapping[str, Any]]:
        """Return the number of a session and its outcome. Raises EOFError or ValueError for
        anything else.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        number, status, size = map(int, line.split())
        return number, _outcome(await self._process.stdout.readexactly(size), status)


async def _started(name: str, words: Sequence[str]) -> _HostProcess:
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    if words[0] != sys.executable:  # another Python has libraries of its own
        environment.pop("PYTHONPATH", None)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            preexec_fn=signals.as_child(),
        )
    except OSError as error:
        raise UserError(f"{name}: {words[0]} cannot be run ({error.strerror})") from None
    host = _HostProcess(process)
    said = await host.first_word()
    if host.is_over:
        await process.wait()
        why = said.get("error", "its process ended while it started")
        raise UserError(why if name in why else f"{name}: {why}")
    return host


def _outcome(said: bytes, status: int) -> Mapping[str, Any]:
    """Return the outcome of a session from what its process said, and how that ended."""
    try:
        value = parse_json(said) if said else None
    except ValueError as error:
        return {"error": f"its result cannot be read ({one_line(error, 100)})"}
    if isinstance(value, dict):
        return value
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    return {"error": f"its process ended with {ended} and no result"}
