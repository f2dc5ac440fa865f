"""Find the end of the thinking in a response: the first end-of-thinking token.

Its text, like that of the confidence tag, is searched for in the bytes of the response, so that
sampled ids and text give the same result. Boxes, programs and confidence tags within the thinking
do not count (docs/bring_your_own.md#thinking-models).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_dcpo.data.chat_template import THINKING
from megatron_dcpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ThinkingTags(NamedTuple):
    """The text of the tokens that open and end the thinking."""

    opening: bytes
    end: bytes


KNOWN = tuple(ThinkingTags(opening.encode(), end.encode()) for opening, end in THINKING)


def find_tags(added: Collection[str]) -> ThinkingTags | None:
    """Return the tags of a tokenizer with these ``added`` tokens, None if it has no end-of-thinking
    token.
    """
    for tags in KNOWN:
        if tags.end.decode() in added:
            return tags
    return None


def check_thinking(wanted: str, tags: ThinkingTags | None, tokenizer: str) -> None:
    """Raise :class:`UserError` if thinking is on and the tokenizer has no token that ends it."""
    if wanted == "on" and tags is None:
        known = ", ".join(tags.end.decode() for tags in KNOWN)
        raise UserError(
            f"thinking=on: the tokenizer of {tokenizer} has no end-of-thinking token ({known}); "
            "set it to off, or choose a model that thinks"
        )


def keep_thinking(
    tokenizer: PreTrainedTokenizerBase | None, tags: ThinkingTags | None
) -> dict[str, Any]:
    """Return the request options with which a server keeps the end-of-thinking token in its text.

    They are empty unless that is a special token of the ``tokenizer``.
    """
    if tokenizer is None or not tags:
        return {}
    for token in tokenizer.added_tokens_decoder.values():
        if token.special and token.content.encode() in tags:
            return {"skip_special_tokens": False}
    return {}


def answer_start(content: bytes, tags: ThinkingTags | None, prompt: bytes = b"") -> int | None:
    """Return the byte of a response at which its answer begins; None if all of it is thinking that
    has not ended.

    ``prompt`` is the end of the prompt that the response continues. If it ends the thinking itself,
    the response has none; if it ends with the opening token, or the response begins with it, the
    response thinks until the end-of-thinking token.
    """
    before = prompt.rstrip()
    if tags is None or before.endswith(tags.end):
        return 0
    end = content.find(tags.end)
    if end >= 0:
        return end + len(tags.end)
    if before.endswith(tags.opening) or content.lstrip().startswith(tags.opening):
        return None
    return 0


def split_reasoning(text: str, tags: ThinkingTags | None, prompt_end: bytes) -> tuple[str, str]:
    """Return the thinking of a text, without its tags, and the rest."""
    content = text.encode(errors="surrogatepass")
    start = answer_start(content, tags, prompt_end)
    if start == 0 or tags is None:
        return "", text
    if start is None:
        return _without_tags(text, tags), ""
    thinking = content[:start].decode(errors="replace")
    answer = content[start:].decode(errors="replace")
    return _without_tags(thinking, tags), answer.lstrip("\n")


def _without_tags(text: str, tags: ThinkingTags) -> str:
    opening, end = tags.opening.decode(), tags.end.decode()
    return text.strip().removeprefix(opening).removesuffix(end).strip()
