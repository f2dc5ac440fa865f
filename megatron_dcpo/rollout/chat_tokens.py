"""Text that an agent sends as token ids, so that nothing whose ids are known is encoded again.

A history goes on from the ids that the engine was given and has sampled. The chat template writes
the history, as text, with and without what is new; if the one begins with the other, only what is
new is encoded, with the end of the turn before it, and stands behind these ids. If not (Qwen3
leaves the thinking out once the user speaks again), the whole is encoded: another segment.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.data.chat_template import (
    ChatSwitches,
    PromptError,
    in_template_words,
    special_tokens,
    turn_end,
    write_chat,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.thinking import ThinkingTags
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.rollout.chat_messages import Message, MessageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = tuple[dict[str, Any], ...]
Ids = Sequence[int] | np.ndarray

_PROBE = "dcpo_probe"
_MOST_MOVED = 16  # messages that a template writes elsewhere than in their order
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": _PROBE, "arguments": {"x": 1}},
        }
    ],
}
_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
_QUESTION: Message = {"role": "user", "content": "What is 1+1?"}


@dataclass(frozen=True)
class ChatTokens:
    """Encodes what agents send, by the tokenizer of the policy. ``tokens`` are the bytes of its
    tokens, ``eos_ids`` those that end a response; ``thinking`` and ``date`` are what the chat
    template is asked for.
    """

    tokenizer: PreTrainedTokenizerBase
    tokens: TokenBytes
    eos_ids: tuple[int, ...]
    thinking: str = "off"
    date: datetime.date | None = None

    @property
    def tags(self) -> ThinkingTags | None:
        """Return the tags of the thinking, if the tokenizer has them."""
        return self.tokens.thinking

    def text_of(self, token_ids: Ids) -> str:
        """Return the text of token ids, special tokens included."""
        return self.bytes_of(token_ids).decode(errors="replace")

    def bytes_of(self, token_ids: Ids) -> bytes:
        """Return the bytes of token ids, special tokens included."""
        return b"".join(self.tokens.pieces(token_ids))

    @cached_property
    def longest_token(self) -> int:
        """Return the bytes of the longest token: no token has more characters."""
        return max(map(len, self.tokens.table))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that goes on."""
        return [] if not text else list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_from_start(self, text: str) -> list[int]:
        """Return the ids of a text that nothing stands before, as data.template=raw encodes it."""
        token_ids = list(self.tokenizer.encode(text))
        first = getattr(self.tokenizer, "bos_token_id", None)
        if first is not None and token_ids[:2] == [first, first]:
            token_ids = token_ids[1:]
        return token_ids

    def has_ended(self, token_ids: Ids) -> bool:
        """Return whether a token that ends a response closes these."""
        return len(token_ids) > 0 and int(token_ids[-1]) in self.eos_ids

    def encode_chat(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Return the ids of a whole chat, ready to be answered. Raises :class:`MessageError` for
        what the template does not write.
        """
        self._check_texts(messages)
        text = self._written(messages, tools, to_answer=True)
        _check_shown(text, messages)
        return self.encode(text)

    def continued(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Tools,
        said: Ids,
    ) -> list[int] | None:
        """Return the ids that stand behind a ``history`` whose last message the policy has ``said``
        (its tokens), up to where it answers the ``new`` messages. None if the template writes the
        history in another way once they follow. Raises :class:`MessageError`.
        """
        self._check_texts(new)
        before = self._written(history, tools, to_answer=False)
        whole = self._written([*history, *new], tools, to_answer=True)
        closer = self.closer
        if not whole.startswith(before):
            before = self._without_empty_thinking(before)
        if not whole.startswith(before) or not before.endswith(closer):
            return None
        behind = whole[len(before) :]
        _check_shown(behind, new)
        end = self.turn_end
        if end is not None and len(said) and int(said[-1]) == end:
            closer = closer.removeprefix(self.text_of([end]))
        return self.encode(closer + behind)

    @cached_property
    def turn_end(self) -> int | None:
        """Return the token with which the template ends a turn of the assistant."""
        return turn_end(self.tokenizer)

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Return the texts of the special tokens."""
        return special_tokens(self.tokenizer)

    @cached_property
    def closer(self) -> str:
        """Return what the template writes behind the text of an assistant's turn: what two turns
        that differ have in common at their end.
        """
        ends = []
        for answer in ("A", "B"):
            chat = [_QUESTION, {"role": "assistant", "content": answer}]
            ends.append(self._written(chat, (), to_answer=False).rpartition(answer)[2])
        return ends[0] if ends[0] == ends[1] else "\0"  # \0: no text ends with it

    def check_tools(self) -> None:
        """Raise :class:`MessageError` unless the chat template writes tools, and calls of them in
        the one form that is read back: Hermes' and Qwen's ``<tool_call>`` with JSON in it.
        """
        try:
            text = self._written([_QUESTION, _CALL], (_TOOL,), to_answer=False)  # type: ignore[arg-type]
        except (MessageError, UserError):
            text = ""
        behind = text.rpartition("<tool_call>")[2]
        in_form = f'"name": "{_PROBE}"' in behind and '"arguments": {"x": 1}' in behind
        if "<tool_call>" not in text or not in_form or "</tool_call>" not in behind:
            raise MessageError(
                "tools are not supported with this chat template: it does not write calls as "
                '<tool_call>{"name": ..., "arguments": ...}</tool_call>, the form that is read back'
            )

    def _written(self, messages: Sequence[Message], tools: Tools, *, to_answer: bool) -> str:
        switches = ChatSwitches(self.thinking, self.date, tools)
        chat = in_template_words(self.tokenizer, tuple(messages))
        try:
            return write_chat(self.tokenizer, chat, switches, to_answer=to_answer)
        except PromptError as error:
            raise MessageError(str(error)) from None
        except UserError:
            raise MessageError(
                "the policy's tokenizer has no chat template: use /v1/completions"
            ) from None

    def _without_empty_thinking(self, text: str) -> str:
        """Return a chat without the last thinking in it if that is empty. Qwen3's template writes
        one before the last answer alone: with thinking off it is what the prompt ended with, and
        no thought is lost or kept.
        """
        if self.tags is None:
            return text
        opening, end = (re.escape(tag.decode()) for tag in self.tags)
        found = list(re.finditer(rf"{opening}\s*{end}\s*", text))
        if not found or self.tags.opening.decode() in text[found[-1].end() :]:
            return text
        return text[: found[-1].start()] + text[found[-1].end() :]

    def _check_texts(self, messages: Sequence[Message]) -> None:
        """Raise :class:`MessageError` for a text that holds a special token: encoded, it would end
        a turn, or begin one.
        """
        for message in messages:
            if message["role"] == "assistant":
                continue  # what the policy has said, or what the agent says it has
            for token in self.special:
                if token in message["content"]:
                    raise MessageError(
                        f"a message of the role {message['role']} holds {token!r}, which is a "
                        "special token of the policy; remove it from the text"
                    )


def _check_shown(text: str, messages: Sequence[Message]) -> None:
    """Raise :class:`MessageError` for a message that is not the policy's and whose content a chat
    does not have in its text; spaces may differ. Messages stand in their order, but for one that a
    template moves to the front.
    """
    written = "".join(text.split())
    moved = 0
    position = 0
    for message in messages:
        if message["role"] == "assistant":
            continue
        content = "".join(message["content"].split())
        found = written.find(content, position)
        if found < 0 and moved < _MOST_MOVED:
            moved += 1
            found = written.find(content, 0, position)
        elif found >= 0:
            position = found + len(content)
        if found < 0:
            raise MessageError(
                f"the chat template does not write a message of the role {message['role']}, "
                f"{message['content']!r:.60}"
            )
