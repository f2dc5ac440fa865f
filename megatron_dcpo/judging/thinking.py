"""Where the thinking part of a response ends: behind the first end-of-thinking token.

Its text is looked for in the bytes of the response, as the confidence tag's is: sampled ids and
text have one answer. Boxes, programs and confidence tags of the thinking are no answer
(docs/rollout.md#thinking-models).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_dcpo.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# at the end of a prompt that may open or end the thinking, which Qwen3's "off" does
PROMPT_TOKENS = 32


class ThinkingTags(NamedTuple):
    """The text of the tokens that open and end the thinking."""

    opening: bytes
    end: bytes


KNOWN = (
    ThinkingTags(b"<think>", b"</think>"),  # Qwen3, DeepSeek-R1, GLM-4.5
    ThinkingTags(b"[THINK]", b"[/THINK]"),  # Magistral
    ThinkingTags(b"<seed:think>", b"</seed:think>"),  # Seed-OSS
)


def find_tags(added: Collection[str]) -> ThinkingTags | None:
    """Return the tags of a tokenizer with these ``added`` tokens, None where it has no
    end-of-thinking token.
    """
    return next((tags for tags in KNOWN if tags.end.decode() in added), None)


def check_thinking(wanted: str, tags: ThinkingTags | None, tokenizer: str) -> None:
    """Raise :class:`UserError` where thinking is on and the tokenizer has no token that ends it."""
    if wanted == "on" and tags is None:
        known = ", ".join(tags.end.decode() for tags in KNOWN)
        raise UserError(
            f"thinking=on: the tokenizer of {tokenizer} has no end-of-thinking token ({known}); "
            "set it to off, or take a "
            "model that thinks"
        )


def keep_thinking(
    tokenizer: PreTrainedTokenizerBase | None, tags: ThinkingTags | None
) -> dict[str, Any]:
    """Return what a server is asked for so that the end-of-thinking token stays in its text, where
    that is a special token; nothing where there is no tokenizer.
    """
    tokens = (
        tokenizer.added_tokens_decoder.values()
        if tokenizer is not None and tags
        else ()
    )
    special = any(
        token.special and token.content.encode() in tags for token in tokens if tags
    )
    return {"skip_special_tokens": False} if special else {}


def answer_start(
    content: bytes, tags: ThinkingTags | None, prompt: bytes = b""
) -> int | None:
    """Return the byte of a response at which its answer begins; None where all of it is thinking,
    which has not ended.

    ``prompt``: the end of what it continues. One that ends the thinking itself leaves none to the
    response; one that ends with the opening token leaves it open, as does a response that begins
    with that token.
    """
    before = prompt.rstrip()
    if tags is None or before.endswith(tags.end):
        return 0
    end = content.find(tags.end)
    if end >= 0:
        return end + len(tags.end)
    return (
        None
        if before.endswith(tags.opening) or content.lstrip().startswith(tags.opening)
        else 0
    )
