"""A teacher behind a vLLM server: it is sent what the policy sampled as a prompt, and returns the
log-probs of the prompt's tokens (``objective.teacher: http://host:8000/v1``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.distributed import Collectives
from megatron_dcpo.runtime.http_json import HttpError, JsonClient
from megatron_dcpo.training.trainer import Trainer
from megatron_dcpo.training.updater import Reading
from megatron_dcpo.types import TokenSequence, TrainingSample

Decode = Callable[[list[int]], str]  # the text of token ids

# With pauses that double up to a minute: a server may be started again while a run trains.
_ATTEMPTS = 10
_ATTEMPTS_BEFORE_A_RUN = 3
_AT_ONCE = 32  # requests of a rank that the server has at the same time
_TOKENS_AT_ONCE = 4096  # of the vocabulary, in a comparison


@dataclass(frozen=True)
class ServedTeacher:
    """The teacher at ``url``, an address with or without ``/v1``, and the teachers of single
    sources of the data, by name. ``attempts`` is how often a request is sent before it has failed.
    """

    url: str
    of_sources: Mapping[str, ServedTeacher] = field(default_factory=dict)
    attempts: int = _ATTEMPTS
    collectives: Collectives = field(default_factory=Collectives)

    @property
    def every(self) -> tuple[ServedTeacher, ...]:
        """Return this teacher and the teachers of sources, each by itself."""
        return self, *self.of_sources.values()

    @property
    def client(self) -> JsonClient:
        """Return what sends requests to the server."""
        base = self.url.rstrip("/").removesuffix("/v1")
        return JsonClient(base, attempts=self.attempts, through_proxy=False)

    @classmethod
    def of(
        cls, url: str, of_sources: Mapping[str, str], attempts: int = _ATTEMPTS
    ) -> ServedTeacher:
        """Return the teacher at ``url`` with the teachers of sources, by name."""
        others = {name: cls(url=other, attempts=attempts) for name, other in of_sources.items()}
        return cls(url=url, of_sources=others, attempts=attempts)

    @classmethod
    def before_a_run(cls, url: str, of_sources: Mapping[str, str]) -> ServedTeacher:
        """Return the teachers as they are checked before a run, which waits for nobody."""
        return cls.of(url, of_sources, attempts=_ATTEMPTS_BEFORE_A_RUN)

    def check(self, tokens: int, decode: Decode) -> None:
        """Raise :class:`UserError` when the server does not answer as it must, or when it has other
        texts of the first ``tokens`` token ids than ``decode`` has, which is the policy's.
        """
        with self._naming_the_server():
            for start in range(0, tokens, _TOKENS_AT_ONCE):
                self._check_tokens(range(start, min(start + _TOKENS_AT_ONCE, tokens)), decode)
            self.read(TokenSequence(np.array([0, 0]), np.array([0])))

    def positions(self) -> int:
        """Return the most tokens of a prompt and the response to it. Raises
        :class:`UserError`.
        """
        with self._naming_the_server():
            (model,) = self.client.call("/v1/models")["data"]
            return int(model["max_model_len"])

    @contextmanager
    def opened(self) -> Iterator[Reading]:
        """Yield what reads samples: nothing has to be brought to the device."""
        yield self.logprobs

    @contextmanager
    def _naming_the_server(self) -> Iterator[None]:
        try:
            yield
        except HttpError as error:
            raise UserError(f"objective.teacher={self.url}: {error}") from None
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"objective.teacher={self.url} does not answer as a vLLM server of one model does "
                f"({type(error).__name__}: {error}); start it with: vllm serve MODEL"
            ) from None

    def _check_tokens(self, ids: Sequence[int], decode: Decode) -> None:
        """Raise :class:`UserError` when the server has other texts of these tokens."""
        theirs = self.client.call("/detokenize", {"tokens": list(ids)})["prompt"]
        if theirs == decode(list(ids)):
            return
        if len(ids) > 1:
            middle = len(ids) // 2
            self._check_tokens(ids[:middle], decode)
            self._check_tokens(ids[middle:], decode)
            return
        raise UserError(
            f"objective.teacher={self.url} has another tokenizer: token {ids[0]} is {theirs!r:.40} "
            f"there and {decode(list(ids))!r:.40} here; a teacher scores the policy's tokens: take "
            "one with the same tokenizer"
        )

    def logprobs(
        self, trainer: Trainer, samples: Sequence[TrainingSample]
    ) -> dict[int, np.ndarray]:
        """Return the log-probs float32 [T_i] of this rank's samples, by their index. Its replica
        shares the requests. Collective. Raises :class:`UserError` on all ranks when the server
        fails.
        """
        indices, _ = trainer.deal(samples)
        replica = trainer.topology.dp_rank
        replicas = self.collectives.gather(replica)
        peers = [rank for rank in self.collectives.ranks if replicas[rank] == replica]
        shares = [indices[place :: len(peers)] for place in range(len(peers))]
        here: dict[int, np.ndarray] = {}
        problem = ""
        try:
            here = self._ask(samples, shares[peers.index(self.collectives.rank)])
        except HttpError as error:
            problem = str(error)
        problems = [one for one in self.collectives.gather(problem) if one]
        if problems:
            raise UserError(f"{problems[0]}; see to the server and continue with --resume auto")
        outgoing: list[dict[int, np.ndarray]] = [{} for _ in self.collectives.ranks]
        for peer in peers:
            outgoing[peer] = here
        found: dict[int, np.ndarray] = {}
        for rows in self.collectives.exchange(outgoing):
            found |= rows
        return found

    def _ask(
        self, samples: Sequence[TrainingSample], indices: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Return the log-probs of these samples. Raises HttpError."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            rows = pool.map(lambda index: self._of_sample(samples[index]), indices)
            return dict(zip(indices, rows, strict=True))

    def _of_sample(self, sample: TrainingSample) -> np.ndarray:
        """Return the log-probs of a response, each segment behind its own context. Raises
        HttpError.
        """
        teacher = self.of_sources.get(sample.prompt.task, self)
        try:
            parts = [teacher.read(sequence) for sequence in sample.sequences]
        except HttpError as error:
            raise HttpError(f"objective.teacher={teacher.url}: {error}") from None
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def read(self, sequence: TokenSequence) -> np.ndarray:
        """Return the log-probs of the tokens behind the ``places`` of a sequence, float32. Raises
        HttpError.
        """
        tokens = sequence.input_ids.tolist()
        targets = (sequence.places + 1).tolist()
        values: list[float] = []

        def problem(reply: Any) -> str:  # noqa: ANN401 - JSON of vLLM
            """Fill ``values``; return what is wrong with the reply."""
            values.clear()
            try:
                rows = reply["choices"][0]["prompt_logprobs"]
                for place in targets:
                    value = rows[place][str(tokens[place])]["logprob"]
                    values.append(float(value))
            except (LookupError, TypeError, ValueError) as error:
                return f"no prompt_logprobs in the reply ({type(error).__name__}: {error})"
            if not all(math.isfinite(value) and value <= 1e-3 for value in values):
                return "a log-prob in the reply is no number below 0"
            return ""

        body = {
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,  # of the prompt's own tokens, and no further ones
        }
        self.client.call("/v1/completions", body, problem=problem)
        return np.array(values, np.float32)
