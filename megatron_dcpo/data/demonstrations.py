"""Demonstrations for supervised training: a prompt, the response that is to be learned, and how
much each of its tokens counts.

A row of a data file is one demonstration, in one of two forms:

- ``messages``: a chat that ends with the assistant's turn, which is the response;
- ``prompt`` and ``response``: each a text, or a list of messages (TRL's ``prompt`` and
  ``completion``). Other usual names of these columns are understood as well (:data:`PROMPTS`,
  :data:`RESPONSES`).

A row may say what counts: ``weight``, a number for the whole response, and ``spans``, a list of
``{start, end, weight}`` in characters of the response, for parts of it. Everything else has
weight 1.

The prompt becomes tokens exactly as in RL (``data/prompts.py``), and the response is tokenized by
itself, with the end token behind it, as an engine would sample it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.data import prompts
from megatron_dcpo.data.datasets import PromptOptions, task_name
from megatron_dcpo.data.files import Row, read_rows
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import BLOCK_REASONING, Judgement, Prompt, Response, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "problem", "question", "instruction", "input")
RESPONSES = ("response", "completion", "answer", "output", "solution")

Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Demonstration:
    """One prompt and its response: ``response_ids`` int64 [T], the end token included, and the
    weight of each token, float64 [T].
    """

    prompt: Prompt
    response_ids: np.ndarray
    weights: np.ndarray

    @property
    def weight(self) -> float:
        """Return the sum of the weights of its tokens."""
        return float(self.weights.sum())

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and response."""
        return len(self.prompt.token_ids) + len(self.response_ids)

    def samples(self) -> list[TrainingSample]:
        """Return it as the sample of a training, whose response nobody sampled and judged."""
        length = len(self.response_ids)
        sample = TrainingSample(
            prompt=self.prompt,
            response=Response(
                prompt_id=self.prompt.prompt_id,
                sample_index=0,
                token_ids=self.response_ids,
                logprobs=np.zeros(length, np.float32),
                finish_reason="stop",
                weights_version=0,
            ),
            judgement=Judgement(
                prompt_id=self.prompt.prompt_id,
                correct=1.0,
                confidence=None,
                status="missing",
                boundary=length,
                length=length,
            ),
            R=1.0,
            block_ids=np.full(length, BLOCK_REASONING, np.int8),
            weights=self.weights,
        )
        return [sample]

    def loss(self, logprobs: Sequence[np.ndarray]) -> float:
        """Return the weighted sum of -log p over its tokens."""
        (row,) = logprobs
        return -float(self.weights @ row.astype(np.float64))

    def digest(self) -> bytes:
        """Return a digest of its tokens and weights."""
        whole = hashlib.sha256(self.prompt.ids.tobytes())
        whole.update(b"/")
        whole.update(self.response_ids.tobytes())
        whole.update(self.weights.tobytes())
        return whole.digest()


@dataclass(frozen=True)
class _Conversation:
    """A row as it was read: the messages before the response, the response, and its weights."""

    messages: Messages
    response: str
    weight: float
    spans: tuple[tuple[int, int, float], ...]
    earlier_turns: int  # of the assistant, which belong to the prompt


def load_demonstrations(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    *,
    columns: Mapping[str, str],
    max_length: int,
) -> list[Demonstration]:
    """Return the demonstrations of a data file, at most ``options.limit`` of them (0: all).

    ``columns`` names the file's columns by ours (``messages``, ``prompt``, ``response``,
    ``weight``, ``spans``). Demonstrations of more than ``max_length`` tokens, and those in which
    nothing counts, are left out, with a line that says how many.

    Raises :class:`UserError` for a row that is none, and if none is left.
    """
    kept: list[Demonstration] = []
    too_long = 0
    without_weight = 0
    with_earlier_turns = 0
    for number, row in enumerate(read_rows(path), start=1):
        if options.limit and len(kept) >= options.limit:
            break
        where = f"{path}: row {number}"
        conversation = _read(row, columns, where)
        demonstration = _tokenized(
            conversation, tokenizer, options, name=f"{task_name(path)}/{number}"
        )
        if demonstration.length > max_length:
            too_long += 1
            continue
        if not demonstration.weights.any():
            without_weight += 1
            continue
        with_earlier_turns += conversation.earlier_turns > 0
        kept.append(demonstration)
    if too_long:
        logger.warning(
            "%s: %d rows of more than data.max_length=%d tokens are left out",
            path,
            too_long,
            max_length,
        )
    if without_weight:
        logger.warning(
            "%s: %d rows in which every token has weight 0 are left out", path, without_weight
        )
    if with_earlier_turns:
        logger.warning(
            "%s: %d chats have earlier turns of the assistant, which belong to the prompt: only "
            "the last turn is trained",
            path,
            with_earlier_turns,
        )
    if not kept:
        raise UserError(
            f"{path}: no row is left to train on; see the lines above, and data.max_length"
        )
    return kept


# ------------------------------------------------------------------------------------------- rows
def _read(row: Row, columns: Mapping[str, str], where: str) -> _Conversation:
    values = dict(row)
    for ours, theirs in columns.items():
        if theirs not in row:
            found = ", ".join(map(str, row)) or "nothing"
            raise UserError(
                f"{where} has no column {theirs!r}, which data.columns names; found {found}"
            )
        values[ours] = row[theirs]
    names_chat = "messages" in columns or not {"prompt", "response"} & set(columns)
    if names_chat and values.get("messages") is not None:
        messages = _messages(values["messages"], where)
    else:
        messages = _prompt_and_response(values, where)
    *before, last = messages
    if last["role"] != "assistant":
        raise UserError(
            f"{where}: the last message is the {last['role']}'s; a demonstration ends with the "
            "assistant's"
        )
    if not before or before[-1]["role"] != "user":
        raise UserError(f"{where}: a demonstration's response follows a message of the user's")
    if not last["content"]:
        raise UserError(f"{where}: the response is empty")
    return _Conversation(
        messages=tuple(before),
        response=last["content"],
        weight=_weight(values.get("weight", 1.0), where),
        spans=_spans(values.get("spans"), len(last["content"]), where),
        earlier_turns=sum(message["role"] == "assistant" for message in before),
    )


def _prompt_and_response(values: Row, where: str) -> Messages:
    prompt = _first(values, PROMPTS, "prompt", where)
    response = _first(values, RESPONSES, "response", where)
    asked: Messages = ({"role": "user", "content": prompt},)
    if not isinstance(prompt, str):
        asked = _messages(prompt, where)
    answered: Messages = ({"role": "assistant", "content": response},)
    if not isinstance(response, str):
        answered = _messages(response, where)
    return (*asked, *answered)


def _first(values: Row, names: Sequence[str], what: str, where: str) -> Any:  # noqa: ANN401 - a value of the file's
    for name in names:
        if values.get(name) is not None:
            return values[name]
    found = ", ".join(map(str, values)) or "nothing"
    raise UserError(
        f"{where} has neither messages nor a {what} ({', '.join(names)}); found {found}; name its "
        f"columns, data.columns={{{what}: NAME}}"
    )


def _messages(value: object, where: str) -> Messages:
    """Return a list of chat messages with role and text."""
    if not isinstance(value, list | tuple) or not value:
        raise UserError(f"{where}: expected a list of messages, got {type(value).__name__}")
    messages = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where}: a message is an object with role and content, not {message!r:.80}"
            )
        for key in ("tool_calls", "weight", "images"):
            if message.get(key) is not None:
                raise UserError(
                    f"{where}: a message has {key}, which is not read in this version; remove it"
                )
        messages.append({"role": message["role"], "content": _text(message.get("content"), where)})
    return tuple(messages)


def _text(content: object, where: str) -> str:
    """Return the content of a message: a text, or a list of parts that are all texts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        texts = [
            part.get("text")
            for part in content
            if isinstance(part, Mapping) and part.get("type") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise UserError(
        f"{where}: the content of a message is not text but {content!r:.60}; only text is trained"
    )


def _weight(value: object, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise UserError(f"{where}: a weight is a number from 0 on, not {value!r:.60}")
    return float(value)  # type: ignore[arg-type]


def _spans(value: object, length: int, where: str) -> tuple[tuple[int, int, float], ...]:
    """Return (start, end, weight) of every span, in characters of a response of ``length``."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: spans is a list, not {type(value).__name__}")
    spans = []
    for span in value:
        if not isinstance(span, Mapping) or set(span) != {"start", "end", "weight"}:
            raise UserError(f"{where}: a span is {{start, end, weight}}, not {span!r:.80}")
        start, end = span["start"], span["end"]
        are_places = type(start) is int and type(end) is int
        if not are_places or not 0 <= start < end <= length:
            raise UserError(
                f"{where}: the span from {start!r:.20} to {end!r:.20} is not in the response of "
                f"{length} characters"
            )
        spans.append((start, end, _weight(span["weight"], where)))
    return tuple(spans)


# ----------------------------------------------------------------------------------------- tokens
def _tokenized(
    conversation: _Conversation,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    name: str,
) -> Demonstration:
    try:
        messages, prompt_ids = prompts.render(
            tokenizer,
            conversation.messages,
            options.template,
            options.marker,
            thinking=options.thinking,
            date=options.date,
        )
    except prompts.PromptError as error:
        raise UserError(f"{name}: {error}") from error
    ids, starts = _with_starts(tokenizer, conversation.response)
    weights = [_weight_at(conversation, start) for start in starts]
    end_token = tokenizer.eos_token_id
    if end_token is None:
        raise UserError(
            "the tokenizer has no end token (eos_token in tokenizer_config.json), with which a "
            "response ends"
        )
    # the end token counts as much as what it follows
    response_ids = np.array([*ids, end_token], np.int64)
    prompt = Prompt(
        prompt_id=name,
        messages=messages,
        token_ids=tuple(prompt_ids),
        ground_truth="",
        task=name.rpartition("/")[0],
    )
    last = weights[-1] if weights else conversation.weight
    return Demonstration(prompt, response_ids, np.array([*weights, last], np.float64))


def _with_starts(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a response, and the character at which each begins."""
    if not tokenizer.is_fast:
        raise UserError(
            "supervised training needs a tokenizer that knows where its tokens begin: put "
            "tokenizer.json next to the model"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    return ids, [start for start, _ in encoded["offset_mapping"]]


def _weight_at(conversation: _Conversation, character: int) -> float:
    """Return the weight of a token that begins at ``character`` of the response: that of the last
    span that it is in.
    """
    weight = 1.0
    for start, end, of_span in conversation.spans:
        if start <= character < end:
            weight = of_span
    return weight * conversation.weight
