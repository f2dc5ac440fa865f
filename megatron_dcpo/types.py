"""The seven records of the data flow, one frozen dataclass per arrow.

    SchemaRow -> Prompt -> Response -> Judgement -> TrainingSample -> MicroBatch -> TokenOutputs

Correctness ``R``, confidence ``c`` and the block boundary are separate fields all the way. They are
never folded into one reward tensor: that is how the public reference code came to train each block
with the other's advantage. Grouping is by ``prompt_id``, never by position in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

ResponseKey = tuple[str, int]  # prompt id and index of a response
Copied = TypeVar("Copied")

BLOCK_NONE, BLOCK_REASONING, BLOCK_CONFIDENCE = 0, 1, 2
BLOCKS = {"reasoning": BLOCK_REASONING, "confidence": BLOCK_CONFIDENCE}
CONFIDENCE_TAG = "<conf>"  # opens the confidence block; configuration key judging.marker

FinishReason = Literal["stop", "length", "abort"]

ConfidenceStatus = Literal[
    "ok",  # exactly one marker, after the last box, one number in [0, 1], nothing after it
    "missing",  # no marker, but the response ended by itself
    "multiple",  # more than one marker
    "unparsable",  # a marker that no decimal number follows
    "out_of_range",  # a number outside [0, 1]
    "trailing_text",  # text after the number
    "before_box",  # the answer is boxed after the confidence
    "truncated",  # the response hit the length limit before its confidence was complete
]
MALFORMED: tuple[ConfidenceStatus, ...] = tuple(
    status for status in get_args(ConfidenceStatus) if status != "ok"
)


@dataclass(frozen=True)
class Limits:
    """The least and the largest value that a number read from a file may have."""

    least: float
    most: float


Count = Annotated[int, Limits(0, 1 << 40)]
Probability = Annotated[float, Limits(0, 1)]


@dataclass(frozen=True)
class SchemaRow:
    """A row of a data file under our names, whatever it calls its columns; None where it has no
    such column (docs/bring_your_own.md#rows).
    """

    problem: object = None  # text, or messages of which the last is the user's
    messages: object = None  # a chat
    answer: object = None  # the key: a text, a number, texts each of which is right; of options one
    options: object = None  # texts, or an object from letter to text
    tests: object = None  # of a program
    outcome: object = None  # of a forecast: what happened, true or false, or a share in [0, 1]
    form: object = None  # of the answer, where the key does not show it: short
    response: object = None  # what is learned
    reasoning: object = None  # before the response
    weight: object = None  # of the response
    spans: object = None  # weights of parts of the response
    system: object = None  # the system message
    context: object = None  # a passage that the problem is about
    tools: object = None  # what the chat template lists
    kind: object = None  # what a confidence is measured within
    data_source: object = None  # the name of the set


SCHEMA = tuple(field.name for field in fields(SchemaRow))


@dataclass(frozen=True)
class Prompt:
    """One problem, rendered and tokenized.

    ``prompt_id`` is unique within a rollout and names the group. ``messages`` and ``token_ids`` are
    what the policy is asked; ``problem`` is the text of the problem without the template. ``task``
    is the name of the data set or benchmark. A programming problem has packed ``tests``
    (``data/code_problems.py``), and its ``ground_truth`` is their key. ``row`` holds the columns of
    the data that a verifier or the order of the prompts reads, ``form`` says what an answer looks
    like (``prompts.ASKS``), and ``kind`` is the kind of problem, if the data names one. ``labels``
    are the other columns of the data that may name a kind: short texts and whole numbers.
    """

    prompt_id: str
    messages: tuple[dict[str, Any], ...]
    token_ids: tuple[int, ...]
    ground_truth: str
    task: str
    tests: bytes | None = None
    row: Mapping[str, Any] | None = field(default=None, compare=False)
    form: str = "math"
    problem: str = ""
    kind: str | None = None
    labels: Mapping[str, Any] | None = field(default=None, compare=False)

    @cached_property
    def ids(self) -> np.ndarray:
        """Return ``token_ids``, int64 [P]."""
        import numpy as np

        return np.asarray(self.token_ids, np.int64)


@dataclass(frozen=True)
class Response:
    """One sampled response: exactly the ids that the engine sampled, EOS included, and its
    log-probs of them.

    ``token_ids`` are int64 [T]. ``logprobs`` are float32 [T], natural log, at the sampling
    temperature (or of the raw logits if the sampling asks for them), under the weights
    ``weights_version``. ``finish_reason`` is ``length`` if the response was cut off before EOS, and
    ``abort`` if its rollout ended before it did. A response that was continued has ``segments``:
    the weights version and the number of tokens of each part, oldest first. ``step`` is the step
    whose RNG stream sampled it.

    Optional: ``top_logprobs``, float32 [T, K], falling, of the raw logits; ``text``, the response
    without its end token, if it is judged by its text (a server gives no ``token_ids``);
    ``token_ends``, int64 [T], the byte of the text after each token; ``experts``, int16
    [P + T - 1, layers, k], the experts chosen for prompt and response, if they are to be replayed:
    of a response in several segments for each sequence, one after another, without its last token.
    Tokens for which nobody recorded any have -1, or are missing at the end.
    """

    prompt_id: str
    sample_index: Count
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    weights_version: int
    top_logprobs: np.ndarray | None = None
    text: str | None = None
    token_ends: np.ndarray | None = None
    experts: np.ndarray | None = None
    step: int = 0
    segments: tuple[tuple[int, int], ...] = ()
    # bool [T], whether the policy sampled each token; None: it sampled all of them. Tokens that a
    # tool or the user's turn wrote are in no block, so nothing is trained on them.
    loss_mask: np.ndarray | None = None
    # the rank that has the tokens, when this rank does not (training/dealing.py)
    holder: int | None = None
    # what a server said that refused this prompt (a content filter, its context length); the text
    # is then empty
    refusal: str | None = None
    # A response in several segments (docs/agents.md#segments): where each begins, and how many
    # tokens of context stand before it instead of the prompt and what was said. Nothing: one
    # segment, behind the prompt.
    contexts: tuple[tuple[Count, Count], ...] = ()
    # int64 [C], the tokens of all contexts, one after another
    context_ids: np.ndarray | None = None
    # the first token of the last answer, which is judged; what is before it only reasons
    answer_from: Count = 0
    # what an agent or its environment says that the response is worth: a ``score`` in [0, 1], and
    # numbers that are logged; None: the judge says it
    verdict: Mapping[str, Any] | None = None
    # what was counted in the session of an agent, for the metrics
    counted: Mapping[str, float] | None = None
    # why there is nothing to judge, or no judgement; the response is left out of its group
    failure: str | None = None
    # What the policy stated behind answers before the last one (docs/agents.md#at-every-turn): the
    # number of the turn, and the confidence, None if it is malformed.
    turn_confidences: tuple[tuple[Count, Probability | None], ...] = ()
    # where the tokens of each of them end: ``token_ids`` begin with these, a segment for each
    branch_ends: tuple[Count, ...] = ()

    @property
    def key(self) -> ResponseKey:
        """Return prompt id and index."""
        return self.prompt_id, self.sample_index

    def sampled(self, values: np.ndarray) -> np.ndarray:
        """Return those of the ``values`` [T, ...] of the response's tokens that belong to tokens
        which the policy sampled, without those of its branches. Every statistic of the response is
        taken of these.
        """
        begin = self.branch_tokens
        values = values[begin:]
        return values if self.loss_mask is None else values[self.loss_mask[begin:]]

    @property
    def branch_tokens(self) -> int:
        """Return how many tokens, at the beginning, state confidences of earlier turns."""
        return self.branch_ends[-1] if self.branch_ends else 0

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """Return where the tokens of each branch begin and end."""
        return tuple(pairwise((0, *self.branch_ends)))

    @property
    def sampled_length(self) -> int:
        """Return the number of tokens that the policy sampled; of a text without token ids, of its
        log-probs. Those of branches do not count.
        """
        tokens = self.token_ids if self.text is None else self.logprobs
        return len(self.sampled(tokens))

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """Return of each of several segments the number of its tokens of context, and where it
        begins and ends in ``token_ids``.
        """
        ends = [start for start, _ in self.contexts[1:]] + [len(self.token_ids)]
        return tuple(
            (count, start, end) for (start, count), end in zip(self.contexts, ends, strict=True)
        )

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Return the weights version and the number of tokens of each part, oldest first."""
        return self.segments or ((self.weights_version, len(self.token_ids)),)

    @property
    def oldest_version(self) -> int:
        """Return the oldest weights version that sampled a token."""
        return self.versions[0][0]


@dataclass(frozen=True)
class Judgement:
    """What a response is worth: its correctness, the stated confidence or why there is none, and
    where its two blocks meet.

    Tokens ``[0, boundary)`` of the response are the reasoning block, ``[boundary, length)`` the
    confidence block; ``boundary`` is None for text whose tokens are not known. ``marker_end`` is
    the first token that begins after the marker, None if it is not known.

    ``correct`` is 0 or 1, or a number between them that a verifier gives; ``score`` is R in [0, 1]
    if ``judging.graded`` asks for it. ``confidence`` is None exactly if ``status`` is not ``ok``;
    ``stated`` is then the number as written, such as 1.2, which the paper's released code used as
    it is (preset ``verl_compat``). ``answered`` says whether an answer begins in the reasoning
    block, after the thinking. ``answer`` is what was judged, the content of the box or the program;
    ``category`` is how the program ended; ``logged`` is what a user's
    verifier returned.
    """

    prompt_id: str
    correct: Probability
    confidence: Probability | None
    status: ConfidenceStatus
    boundary: Count | None
    length: Count
    stated: float | None = None
    answered: bool = True
    marker_end: int | None = None
    answer: str | None = field(default=None, compare=False)
    category: str | None = field(default=None, compare=False)
    score: Probability | None = None
    logged: Mapping[str, Any] | None = field(default=None, compare=False)
    abstained: bool = False  # the box says that the answer is not known
    # before the answer; None if the text's tokens are not known
    thinking_tokens: Count | None = 0
    thinking_characters: Count = 0  # of the text
    sampled_tokens: Count | None = None  # of the ``length``; None: all

    @property
    def sampled_length(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return self.length if self.sampled_tokens is None else self.sampled_tokens

    @property
    def R(self) -> float:
        """Return the reward of the answer: the score if it is graded, else the correctness."""
        return self.correct if self.score is None else self.score


class TokenSequence(NamedTuple):
    """A sequence of the forward pass: its tokens ``input_ids``, int64 [S], and the ``places`` whose
    logits score its response tokens, int64: the one before each.
    """

    input_ids: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class TrainingSample:
    """One judged response on its way to the loss. Each stage returns a copy with its fields filled.

    The policy fills ``old_logprobs`` (unless the update is the rollout's only one),
    ``ref_logprobs`` (if there is a KL loss) and ``teacher_logprobs`` (if there is a teacher),
    float32 [T], on the ranks that compute the sample. The objective fills the rewards ``R`` and
    ``R_c``, and for each response token its ``advantages`` float64 [T], its block ``block_ids``
    int8 [T] (``BLOCK_*``), and its share of the loss ``weights`` float64 [T].
    """

    prompt: Prompt
    response: Response
    judgement: Judgement
    old_logprobs: np.ndarray | None = None
    mean_old_logprob: float | None = None  # on all ranks, for methods whose score reads it
    ref_logprobs: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    R: float = math.nan
    R_c: float = math.nan
    advantages: np.ndarray | None = None
    block_ids: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def prompt_ids(self) -> np.ndarray:
        """Return the prompt's token ids, int64 [P]."""
        return self.prompt.ids

    @property
    def response_ids(self) -> np.ndarray:
        """Return the response's token ids, int64 [T]: those that are scored."""
        return self.response.token_ids

    @property
    def length(self) -> int:
        """Return the number of tokens of the forward pass."""
        return sum(self.sequence_lengths)

    @property
    def input_ids(self) -> np.ndarray:
        """Return prompt and response, int64 [P + T]: the tokens of the forward pass if the response
        has one segment.
        """
        import numpy as np

        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def places(self) -> np.ndarray:
        """Return the position of :attr:`input_ids` whose logits score each response token, int64
        [T]: the one before it.
        """
        import numpy as np

        first = len(self.prompt_ids) - 1
        return np.arange(first, first + len(self.response_ids))

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the sequences of the forward pass: one for each segment of the response, in the
        order of its tokens.
        """
        import numpy as np

        response = self.response
        if not response.contexts:
            return (TokenSequence(self.input_ids, self.places),)
        assert response.context_ids is not None
        sequences = []
        begun = 0  # of the tokens of contexts
        for count, start, stop in response.parts:
            context = response.context_ids[begun : begun + count]
            begun += count
            input_ids = np.concatenate([context, response.token_ids[start:stop]])
            sequences.append(TokenSequence(input_ids, np.arange(count - 1, len(input_ids) - 1)))
        return tuple(sequences)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each of the :attr:`sequences`, which are known on ranks
        without the tokens too.
        """
        if not self.response.contexts:
            return (len(self.prompt_ids) + len(self.response_ids),)
        return tuple(count + stop - start for count, start, stop in self.response.parts)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass and the loss read.

    ``tokens`` and ``position_ids`` are int64 [b, s], or [1, t] when packed (``packed_seq_params``
    is then Megatron's). ``rows``, int64 [N], are the flat indices of the logits that score each
    response token, ``targets``, int64 [N], those tokens, and ``sequence_ids``, int64 [N], the
    number of each token's sample in ``samples``. ``R``, [S], are the rewards of the samples.
    ``columns`` hold what the loss reads of each response token, [N] each: ``advantages``,
    ``block_ids``, ``weights``, ``engine_logprobs``, and ``old_logprobs``, ``ref_logprobs`` and
    ``teacher_logprobs`` if the samples have them. ``is_part`` marks some response tokens of a
    micro-batch, of which no statistics are taken. ``experts``, int16 [*tokens.shape, layers, k],
    are the experts that the routers take for each token; -1 leaves the choice to them.

    Under context parallelism ``tokens`` and ``position_ids`` are this rank's, [b, s / CP], and
    ``here``, int64 [n], ascending, are the response tokens whose logits this rank has; ``rows`` of
    the others is -1.
    """

    tokens: Tensor
    position_ids: Tensor
    packed_seq_params: Any
    rows: Tensor
    targets: Tensor
    sequence_ids: Tensor
    samples: tuple[TrainingSample, ...]
    R: Tensor
    columns: Mapping[str, Tensor]
    here: Tensor | None = None
    experts: Tensor | None = None
    is_part: bool = False

    @cached_property
    def block_rows(self) -> dict[str, Tensor]:
        """Return the places of each block's tokens among the response tokens, found once: each
        search waits for the device.
        """
        blocks = self.columns["block_ids"]
        return {block: (blocks == index).nonzero()[:, 0] for block, index in BLOCKS.items()}

    def part(self, rows: slice | Tensor) -> MicroBatch:
        """Return the response tokens ``rows`` alone."""
        return replace(
            self,
            rows=self.rows[rows],
            targets=self.targets[rows],
            sequence_ids=self.sequence_ids[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
            is_part=True,
        )

    def local(self) -> MicroBatch:
        """Return the response tokens that this context-parallel rank has."""
        return self if self.here is None else self.part(self.here)


@dataclass(frozen=True)
class TokenOutputs:
    """Log-probs [N] and entropies [N] of the policy at N response tokens, natural log, fp32."""

    logprobs: Tensor
    entropy: Tensor


def replaced(value: Copied, **fields: object) -> Copied:
    """Return ``value`` with other ``fields``: ``dataclasses.replace`` without a look at each field,
    of which a step would take thousands; for what has no ``__post_init__``.
    """
    copied = object.__new__(type(value))
    vars(copied).update(vars(value), **fields)
    return copied
