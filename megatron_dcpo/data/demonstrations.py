"""Demonstrations for supervised training: a prompt, the response that is to be learned, and how
much each of its tokens counts.

A row of a data file is one demonstration: ``messages``, a chat that ends with the assistant's turn,
which is the response, or ``problem`` and ``response`` (``demonstration_rows.py``).

A row may say what counts: ``weight``, a number for the whole response, and ``spans``, a list of
``{start, end, weight}`` in characters of the response, for parts of it. Everything else has
weight 1.

The prompt becomes tokens exactly as in RL (``data/prompts.py``), and the response is tokenized by
itself, with the end of the chat template's own turn behind it, as an engine would sample it. A turn
with reasoning or calls of tools is learned as the template writes it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron_dcpo.data import prompts
from megatron_dcpo.data.chat_template import (
    PROMPT_TOKENS,
    ChatSwitches,
    end_token_of,
    markup_in,
    opened_in_prompt,
    split_end,
    written_answer,
)
from megatron_dcpo.data.chats import Messages
from megatron_dcpo.data.datasets import PromptOptions, task_name
from megatron_dcpo.data.demonstration_rows import Conversation, DemonstrationReader
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.data.row_reader import PLAIN, RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import BLOCK_REASONING, Judgement, Prompt, Response, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_EARLIER_TURNS = (
    "chats have earlier turns of the assistant, which belong to the prompt: only the last turn is "
    "trained"
)


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

    def sample(self) -> TrainingSample:
        """Return it as the sample of a training, whose response nobody sampled and judged."""
        length = len(self.response_ids)
        return TrainingSample(
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

    def loss(self, logprobs: np.ndarray) -> float:
        """Return the weighted sum of -log p over its tokens, given their log-probs [T]."""
        return -float(self.weights @ logprobs.astype(np.float64))

    def digest(self) -> bytes:
        """Return a digest of its tokens and weights."""
        whole = hashlib.sha256(self.prompt.ids.tobytes())
        whole.update(b"/")
        whole.update(self.response_ids.tobytes())
        whole.update(self.weights.tobytes())
        return whole.digest()


def load_demonstrations(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    *,
    max_length: int,
    reading: RowOptions = PLAIN,
) -> list[Demonstration]:
    """Return the demonstrations of a data file, at most ``options.limit`` of them (0: all).

    ``reading`` says how a row is read. Demonstrations of more than ``max_length`` tokens, and those
    in which nothing counts, are left out, with a line that says how many.

    Raises :class:`UserError` for a row that is none, and if none is left.
    """
    kept: list[Demonstration] = []
    counts: Counter[str] = Counter()
    reader = DemonstrationReader(path, reading)
    for number, row in enumerate(read_rows(path), start=1):
        if options.limit and len(kept) >= options.limit:
            break
        conversation = reader.read(row, number)
        if conversation is None:
            continue
        demonstration = _tokenized(conversation, tokenizer, options, path, number)
        if demonstration.length > max_length:
            counts[f"rows of more than data.max_length={max_length} tokens are left out"] += 1
        elif not demonstration.weights.any():
            counts["rows in which every token has weight 0 are left out"] += 1
        else:
            counts[_EARLIER_TURNS] += conversation.earlier_turns > 0
            kept.append(demonstration)
    reader.rows.report()
    for what, count in counts.items():
        if count:
            logger.warning("%s: %d %s", path, count, what)
    if not kept:
        raise UserError(
            f"{path}: no row is left to train on; see the lines above, and data.max_length"
        )
    return kept


# ----------------------------------------------------------------------------------------- tokens
def _tokenized(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions,
    path: str,
    number: int,
) -> Demonstration:
    switches = ChatSwitches(options.thinking, options.date, conversation.tools)
    try:
        messages = _messages_as_sent(conversation.messages, options)
        prompt_ids = prompts.encode(tokenizer, messages, options.template, switches)
        text, end_token = _response(conversation, messages, tokenizer, options.template, switches)
        first = 0
        if conversation.answer is None and prompts.find_template(options.template).chat:
            end_of_prompt = tokenizer.decode(prompt_ids[-PROMPT_TOKENS:])
            first = opened_in_prompt(str(end_of_prompt), text)
    except prompts.PromptError as error:
        raise UserError(f"{path}: row {number}: {error}") from error
    ids, starts = _with_starts(tokenizer, text[first:])
    weights = [_weight_at(conversation, first + start) for start in starts]
    # the end token counts as much as what it follows
    response_ids = np.array([*ids, end_token], np.int64)
    task = task_name(path)
    prompt = Prompt(
        prompt_id=f"{task}/{number}",
        messages=messages,
        token_ids=tuple(prompt_ids),
        ground_truth="",
        task=task,
    )
    last = weights[-1] if weights else conversation.weight
    return Demonstration(prompt, response_ids, np.array([*weights, last], np.float64))


def _messages_as_sent(messages: Messages, options: PromptOptions) -> Messages:
    """Return the messages with the problem as ``data.template`` puts it; a response behind a tool's
    result has none.
    """
    if messages[-1]["role"] != "tool":
        return prompts.ask(messages, options.template, options.marker)
    if prompts.find_template(options.template).instruct is not prompts.as_it_is:
        raise prompts.PromptError(
            f"data.template={options.template} changes the user's last message; behind the result "
            "of a tool use data.template=chat"
        )
    return messages


def _response(
    conversation: Conversation,
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    switches: ChatSwitches,
) -> tuple[str, int]:
    """Return the text of the response without an end token, and the token that ends it. Raises
    :class:`prompts.PromptError` for a text that holds several turns.
    """
    is_chat = prompts.find_template(template).chat
    if conversation.answer is None:
        text, end = split_end(tokenizer, conversation.response, chat=is_chat)
    elif is_chat:
        text, end = written_answer(tokenizer, messages, conversation.answer, switches)
    else:
        keys = [key for key in conversation.answer if key not in ("role", "content")]
        raise prompts.PromptError(
            f"only a chat template writes {keys[0]}; use another data.template than raw"
        )
    if not text.strip():
        raise prompts.PromptError("the response is empty")
    token = markup_in(tokenizer, text) if is_chat else None
    if token:
        raise prompts.PromptError(
            f"the response holds {token!r:.40}, which the chat template writes around a turn; give "
            "the chat as messages, or use data.template=raw"
        )
    end_of_others = end_token_of(text) if is_chat else None
    if end_of_others:
        raise prompts.PromptError(
            f"the response ends with {end_of_others!r}, the end token of another model, which "
            "would be learned as text; remove it, or use data.template=raw"
        )
    return text, end


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


def _weight_at(conversation: Conversation, character: int) -> float:
    """Return the weight of a token that begins at ``character`` of the response: that of the last
    span that it is in.
    """
    weight = 1.0
    for start, end, of_span in conversation.spans:
        if start <= character < end:
            weight = of_span
    return weight * conversation.weight
