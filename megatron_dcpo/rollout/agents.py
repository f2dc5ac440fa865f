"""Agents make the responses: each runs as its author wrote it, in a process of its own, with the
policy as its OpenAI endpoint (:mod:`megatron_dcpo.rollout.openai_server`).

A failed session is dropped from its group; it never counts as wrong, and its
:attr:`Response.failure` says why. One whose agent ends after a call was refused because its budget
is used up is truncated.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dcpo.config.sections import AgentsConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.verdicts import checked_result
from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.engine import Engine
from megatron_dcpo.rollout.openai_server import PolicyEndpoint
from megatron_dcpo.rollout.sampling import Samples, SamplingConfig, sample_seed
from megatron_dcpo.rollout.sessions import PlannedCall, Session, SessionLimits, failed
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.brought import HASH_SEED
from megatron_dcpo.runtime.text import printable
from megatron_dcpo.types import Prompt, Response, ResponseKey

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
# Writable memory of each process of a session, so that one that leaks ends before the host's does.
MEMORY_BYTES = 4 << 30
_HOST = Path(__file__).with_name("agent_host.py")
# runs a file as a program that finds modules in the working directory, and none beside it
_RUNS_FILE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class AgentOptions:
    """What runs, a function by import path (``agent``) in the Python at ``python``, or a
    ``command``, and its limits. ``sequence_tokens`` is the longest sequence that the engine takes;
    ``marker`` opens a confidence, for which the policy is asked if ``asks_confidence``.
    """

    agent: str
    command: str
    at_once: int
    seconds: float
    calls: int
    sequence_tokens: int
    marker: str
    asks_confidence: bool
    python: str = sys.executable

    @property
    def option(self) -> str:
        """Return the option that names what runs, for messages."""
        if self.agent:
            return f"rollout.agent={self.agent}"
        return f"rollout.command={self.command}"


def options_of(rollout: AgentsConfig, sequence_tokens: int, marker: str) -> AgentOptions:
    """Return the options of the section ``rollout`` of a configuration."""
    return AgentOptions(
        agent=rollout.agent,
        command=rollout.command,
        at_once=rollout.agent_sessions,
        seconds=rollout.agent_seconds,
        calls=rollout.agent_calls,
        sequence_tokens=sequence_tokens,
        marker=marker,
        asks_confidence=rollout.asks_confidence,
        python=rollout.agent_python or sys.executable,
    )


class AgentRollout:
    """Runs agents on the samples of a rollout; the endpoint and the processes running until
    :meth:`close`.
    """

    def __init__(self, engine: Engine, chat: ChatTokens, options: AgentOptions, model: str) -> None:
        self.engine = engine
        self.chat = chat
        self.options = options
        self.host = AgentHost(program_of(options), options.seconds)
        self.endpoint = PolicyEndpoint(chat, model)
        self._warned = False

    def close(self) -> None:
        """End the processes and the endpoint."""
        self.host.close()
        self.endpoint.close()

    def stream(
        self, samples: Samples, sampling: SamplingConfig, step: int = 0
    ) -> Generator[list[Response], None, None]:
        """Yield the response of every (prompt, index) when its session has ended. Raises what
        :meth:`Engine.serve` raises.
        """
        arrivals = Arrivals()
        sessions = _Sessions(self, arrivals, samples, sampling, step)
        self.host.woken = arrivals.wake
        self.endpoint.arrivals = arrivals
        try:
            sessions.start()
            with closing(self.engine.serve(arrivals, sampling, step)) as served:
                for responses in served:
                    finished = sessions.advance(responses)
                    if sessions.are_over:
                        arrivals.close()
                    if finished:
                        yield finished
        finally:
            self.endpoint.arrivals = None
            sessions.give_up()

    def warn(self, key: ResponseKey, why: str) -> None:
        """Log the first session of a run that fails; the others are counted."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: response %d to %s: %s; it is left out, as are others that fail, and counted "
                "in rollout/agent_error",
                self.options.option,
                key[1],
                key[0],
                printable(why)[:400],
            )


@dataclass(eq=False)
class _RunningSession:
    """A session under way: its agent's process, by its ``number``, until the policy is asked for
    its confidence, which is the call ``planned``. ``key`` is that of the endpoint.
    """

    session: Session
    key: str
    number: int
    verdict: Mapping[str, Any] | None = None
    planned: PlannedCall | None = None


class _Sessions:
    """The sessions of one rollout."""

    def __init__(
        self,
        rollout: AgentRollout,
        arrivals: Arrivals,
        samples: Samples,
        sampling: SamplingConfig,
        step: int,
    ) -> None:
        self.rollout = rollout
        self.options = rollout.options
        self.arrivals = arrivals
        self.sampling = sampling
        self.step = step
        self.waiting = deque(samples)
        self.agents: dict[int, _RunningSession] = {}  # by the numbers of their processes
        self.plain: dict[
            str, _RunningSession
        ] = {}  # without a process, by the names of their calls
        self.asked: dict[
            str, _RunningSession
        ] = {}  # for their confidence, by the names of the calls

    @property
    def are_over(self) -> bool:
        return not (self.waiting or self.agents or self.asked)

    def start(self) -> None:
        """Start sessions, as many as run at once."""
        while self.waiting and len(self.agents) < self.options.at_once:
            prompt, index = self.waiting.popleft()
            session = Session(
                prompt=prompt,
                index=index,
                chat=self.rollout.chat,
                limits=SessionLimits(
                    response_tokens=self.sampling.max_tokens,
                    sequence_tokens=self.options.sequence_tokens,
                    calls=self.options.calls,
                ),
            )
            key = self.rollout.endpoint.open(session)
            number = self.rollout.host.start(
                problem=self._problem(prompt, index),
                base_url=f"{self.rollout.endpoint.url}/s/{key}/v1",
                api_key=key,
            )
            self.agents[number] = _RunningSession(session, key, number)

    def _put(self, planned: PlannedCall, session: Session) -> None:
        (name,) = planned.names
        prompt = replace(session.prompt, prompt_id=name, token_ids=planned.prompt_ids)
        self.arrivals.put(EngineCall(prompt, session.index, planned.max_tokens))

    def advance(self, responses: Iterable[Response]) -> list[Response]:
        """Take what the engine and the agents have said; return the responses of sessions that are
        over now.
        """
        finished = []
        for_endpoint = []
        for response in responses:
            running = self.asked.pop(response.prompt_id, None)
            if running is None:
                for_endpoint.append(response)
                continue
            assert running.planned is not None
            running.session.add_confidence(running.planned, response)
            finished.append(running.session.response(running.verdict))
        if for_endpoint:
            self.rollout.endpoint.deliver(for_endpoint)
        for number, outcome in self.rollout.host.outcomes():
            running = self.agents.pop(number, None)
            if running is not None:  # not of an earlier rollout
                finished += self._ended(running, outcome)
        self.start()
        return finished

    def give_up(self) -> None:
        """End what is under way."""
        for running in self.agents.values():
            self.rollout.host.kill(running.number)
            self.rollout.endpoint.seal(running.key)
        self.agents.clear()

    def _ended(self, running: _RunningSession, outcome: Mapping[str, Any]) -> list[Response]:
        """Return the response of a session whose agent has ended; nothing while the policy is
        asked for its confidence.
        """
        self.rollout.endpoint.seal(running.key)
        session = running.session
        why, verdict = verdict_of(outcome)
        if why and session.is_out_of_budget:
            why, verdict = "", None
        if not why and not session.turns:
            why = "it has never asked the policy"
        if why:
            self.rollout.warn((session.prompt.prompt_id, session.index), why)
            version = self.rollout.engine.weights_version
            return [failed(session.prompt, session.index, why, version, self.step)]
        running.verdict = verdict
        running.planned = None
        if self.options.asks_confidence:
            running.planned = session.ask_confidence(self.options.marker)
        if running.planned is None:
            return [session.response(verdict)]
        self.asked[running.planned.names[0]] = running
        self._put(running.planned, session)
        return []

    def _problem(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """Return what an agent is told."""
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


@dataclass(frozen=True)
class HostProgram:
    """The words that start ``agent_host.py`` without its limits, and what its sessions run: the
    ``kind`` (agent or command), and its ``text``. ``name`` is that of what runs, for messages.
    """

    name: str
    words: tuple[str, ...]
    kind: str = ""
    text: str = ""

    @property
    def is_in_this_python(self) -> bool:
        return self.words[0] == sys.executable


def program_of(options: AgentOptions) -> HostProgram:
    """Return what starts the sessions."""
    return HostProgram(
        name=options.option,
        words=(options.python, "-c", _RUNS_FILE, str(_HOST)),
        kind="agent" if options.agent else "command",
        text=options.agent or options.command,
    )


_NUMBERS = itertools.count(1)  # of sessions' processes, of all hosts


class AgentHost:
    """The process that starts sessions (``agent_host.py``); it is started again if it ends."""

    def __init__(self, program: HostProgram, seconds: float) -> None:
        self.program = program
        self.limits = ("--seconds", f"{seconds}", "--memory", f"{MEMORY_BYTES}")
        self.woken: Callable[[], None] = lambda: None
        self._outcomes: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._live: set[int] = set()
        self._is_over = False  # it has closed its pipe; the process may linger
        self._lock = threading.Lock()
        self._process = self._started()

    def start(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> int:
        """Start an agent; return the number under which its outcome comes."""
        number = next(_NUMBERS)
        while not self._is_told(number):
            self._process.kill()
            self._process.wait()
            self._process = self._started()
        self._say({"id": number, "problem": problem, "base_url": base_url, "api_key": api_key})
        return number

    def _is_told(self, number: int) -> bool:
        """Return whether the outcome of a session will come: not from a process that is over."""
        with self._lock:
            if not self._is_over:
                self._live.add(number)
            return not self._is_over

    def kill(self, number: int) -> None:
        """End an agent."""
        self._say({"kill": number})

    def outcomes(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the outcomes that have come: ``value`` or ``error``."""
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._outcomes.get_nowait())
        return found

    def close(self) -> None:
        """End all agents."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()
        self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        """Return a process that is ready. Raises :class:`UserError` if the agent cannot be
        loaded.
        """
        program = self.program
        environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
        if not program.is_in_this_python:  # which has libraries of its own
            environment.pop("PYTHONPATH", None)
        try:
            process = subprocess.Popen(
                [*program.words, *self.limits, "--", program.kind, program.text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                preexec_fn=signals.as_child(),
            )
        except OSError as error:
            raise UserError(
                f"{program.name}: {program.words[0]} cannot be run ({error.strerror})"
            ) from None
        timer = threading.Timer(_START_SECONDS, process.kill)
        timer.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        timer.cancel()
        said = json.loads(line) if line.strip() else {}
        if not said.get("ready"):
            process.kill()
            process.wait()
            why = said.get("error", "its process ended while it started")
            if program.name in why:
                raise UserError(why)
            raise UserError(f"{program.name}: {why}")
        self._is_over = False
        threading.Thread(target=self._listen, args=(process,), name="agents", daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Take what a process says, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            word = json.loads(line)
            with self._lock:
                self._live.discard(word["id"])
            self._outcomes.put((word.pop("id"), word))
            self.woken()
        with self._lock:
            self._is_over = True
            lost, self._live = self._live, set()
        for number in lost:
            self._outcomes.put((number, {"error": "the process that starts agents has ended"}))
        self.woken()

    def _say(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended: its sessions are lost
            self._process.stdin.write(json.dumps(order, default=str).encode() + b"\n")
            self._process.stdin.flush()
