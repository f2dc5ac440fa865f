"""A user's rollout (``rollout.function``): several turns, tools, an environment.

A function ``rollout(samples, context)`` yields lists of responses in any order, one for every
(prompt, index) of ``samples``. ``context`` samples with the engine as often as the function likes,
and a :class:`Transcript` makes one response of several turns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.rollout.engine import Engine, EngineError, Samples, SamplingConfig
from megatron_dcpo.runtime.plugins import check_signature, load_object
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.types import FinishReason, Prompt, Response, ResponseKey

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPTION = "rollout.function"
_ROUNDING = 1e-3  # by which a log-prob may exceed 0


@dataclass(frozen=True)
class RolloutContext:
    """What a user's rollout works with: this rank's engine, and how a response is sampled."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    sampling: SamplingConfig
    step: int

    def sample(
        self, samples: Samples, max_tokens: int | None = None
    ) -> Generator[list[Response], None, None]:
        """Yield the engine's response to every (prompt, index), as it is finished, with at most
        ``max_tokens`` tokens; the default is ``rollout.max_response_length``.
        """
        sampling = self.sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        return self.engine.stream(samples, sampling, self.step)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.decode([int(token) for token in token_ids]))


@dataclass(frozen=True)
class Transcript:
    """A response to ``prompt`` that grows turn by turn; ``sample_index`` is its number in the
    group.

    ``turns`` are what the engine sampled, with ``token_ids`` and ``logprobs``, and what was
    written, as token ids.
    """

    prompt: Prompt
    sample_index: int
    turns: tuple[Response | np.ndarray, ...] = field(default=())

    @property
    def token_ids(self) -> np.ndarray:
        """Return all tokens after the prompt, int64 [T]."""
        parts = [_tokens(turn) for turn in self.turns]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def next_prompt(self) -> Prompt:
        """Return what the engine is asked next: the prompt and everything after it.

        No other turn and no other response has its id: engines read equal ids as equal prompts, and
        the turn has its own random numbers.
        """
        number = sum(isinstance(turn, Response) for turn in self.turns) + 1
        return replace(
            self.prompt,
            prompt_id=f"{self.prompt.prompt_id}/{self.sample_index}/turn {number}",
            token_ids=(*self.prompt.token_ids, *self.token_ids.tolist()),
        )

    def sampled(self, turn: Response, tokens: int | None = None) -> Transcript:
        """Return the transcript with a turn of the policy, or with its first ``tokens`` tokens."""
        if tokens is not None:
            turn = replace(turn, token_ids=turn.token_ids[:tokens], logprobs=turn.logprobs[:tokens])
        return replace(self, turns=(*self.turns, turn))

    def written(self, token_ids: Sequence[int]) -> Transcript:
        """Return the transcript with tokens that the policy did not sample."""
        return replace(self, turns=(*self.turns, np.asarray(token_ids, np.int64)))

    def response(self) -> Response:
        """Return the whole as one response, on whose sampled tokens alone the policy is trained.

        It has the weights version and the finish reason of the last turn. Raises ValueError when
        the last turn is not the policy's.
        """
        if not self.turns or not isinstance(self.turns[-1], Response):
            raise ValueError("the last turn of a transcript has to be the policy's")
        last = self.turns[-1]
        logprobs = []
        loss_mask = []
        for turn in self.turns:
            if isinstance(turn, Response):
                logprobs.append(turn.logprobs)
                loss_mask.append(np.ones(len(turn.token_ids), np.bool_))
            else:
                logprobs.append(np.zeros(len(turn), np.float32))
                loss_mask.append(np.zeros(len(turn), np.bool_))
        return Response(
            prompt_id=self.prompt.prompt_id,
            sample_index=self.sample_index,
            token_ids=self.token_ids,
            logprobs=np.concatenate(logprobs),
            finish_reason=last.finish_reason,
            weights_version=last.weights_version,
            step=last.step,
            loss_mask=np.concatenate(loss_mask),
        )


def _tokens(turn: Response | np.ndarray) -> np.ndarray:
    return turn.token_ids if isinstance(turn, Response) else turn


RolloutFunction = Callable[[Samples, RolloutContext], Iterable[list[Response]]]


def load_rollout_function(path: str) -> RolloutFunction:
    """Return the function that ``rollout.function`` names. Raises :class:`UserError`."""
    function: RolloutFunction = load_object(path, OPTION)
    check_signature(function, path, OPTION, "samples", "context")
    return function


@dataclass(frozen=True)
class ResponseLimits:
    """What a response that can be trained on keeps to: its number of tokens, and their ids."""

    max_tokens: int
    vocab_size: int


def checked_stream(
    function: RolloutFunction,
    path: str,
    samples: Samples,
    context: RolloutContext,
    vocab_size: int,
) -> Generator[list[Response], None, None]:
    """Yield what a user's rollout yields, for a model with ``vocab_size`` embeddings. Raises
    :class:`UserError`, which names the option, when the function fails or would end the process,
    and for responses that cannot be trained on.
    """
    missing = {(prompt.prompt_id, index) for prompt, index in samples}
    limits = ResponseLimits(max_tokens=context.sampling.max_tokens, vocab_size=vocab_size)
    try:
        for together in function(samples, context):
            for response in together:
                problem = _problem_of(response, missing, limits)
                if problem:
                    raise UserError(f"{OPTION}={path}: {problem}")
                missing.discard(response.key)
            yield list(together)
    except (EngineError, RolloutAbandoned, UserError, GeneratorExit):
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {one_line(error, 300)}"
        raise UserError(f"{OPTION}={path}: {what}") from error
    if missing:
        prompt_id, index = min(missing)
        raise UserError(
            f"{OPTION}={path}: {len(missing)} responses are missing, among them response {index} "
            f"to {prompt_id}; yield one for every (prompt, index) of samples"
        )


def _problem_of(response: Response, missing: set[ResponseKey], limits: ResponseLimits) -> str:
    """Return why a response of a user's rollout cannot be trained on; empty when it can."""
    if not isinstance(response, Response):
        return f"it yielded a list with a {type(response).__name__}; yield lists of Response"
    name = f"response {response.sample_index} to {response.prompt_id}"
    if response.key not in missing:
        return f"{name} was not asked for, or came twice"
    if response.finish_reason not in get_args(FinishReason):
        known = ", ".join(get_args(FinishReason))
        return f"{name}: finish_reason is {response.finish_reason!r:.40}; it must be one of {known}"
    problem = _problem_of_tokens(response, limits) or _problem_of_logprobs(response)
    return f"{name}{problem}" if problem else ""


def _problem_of_tokens(response: Response, limits: ResponseLimits) -> str:
    """Return what is wrong with the tokens, to be read after the response's name."""
    ids = response.token_ids
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        return ": token_ids must be int64 [T]"
    length = len(ids)
    if not 0 < length <= limits.max_tokens:
        most = f"rollout.max_response_length={limits.max_tokens}"
        return f" has {length} tokens; {most} is for all turns"
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        return f": its token ids must be at least 0 and below {limits.vocab_size}, the embeddings"
    mask = response.loss_mask
    if mask is None:
        return ""
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (length,):
        return f": loss_mask must be bool [{length}], one value a token"
    if not mask.any():
        return ": loss_mask says that the policy sampled no token"
    return ""


def _problem_of_logprobs(response: Response) -> str:
    """Return what is wrong with the log-probs, to be read after the response's name."""
    length = len(response.token_ids)
    logprobs = response.logprobs
    if not isinstance(logprobs, np.ndarray) or logprobs.dtype != np.float32:
        return ": logprobs must be float32 [T]"
    if logprobs.shape != (length,):
        return f" has {length} tokens and log-probs of the shape {logprobs.shape}"
    sampled = logprobs if response.loss_mask is None else logprobs[response.loss_mask]
    if not np.isfinite(sampled).all() or sampled.max() > _ROUNDING:
        return ": log-probs of sampled tokens must be finite numbers of at most 0"
    return ""
