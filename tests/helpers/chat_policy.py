"""A tokenizer that chats as Qwen3 does, and policies with it: scripted ones, and a tiny random model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.types import Prompt, Response

TEMPLATES = Path(__file__).parent
CHATML = (TEMPLATES / "plain_chat.jinja").read_text()
QWEN3 = (TEMPLATES / "qwen3_chat.jinja").read_text()
END = "<|im_end|>"


@cache
def tokenizer(template: str = QWEN3) -> Any:
    """A token per byte, one for ``ab``, and those of ChatML."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[("a", "b")]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END), AddedToken("<|im_start|>")])
    for piece in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        backend.add_tokens([AddedToken(piece, special=False, normalized=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    made.chat_template = template
    return made


def chat_tokens(template: str = QWEN3, thinking: str = "off") -> ChatTokens:
    made = tokenizer(template)
    return ChatTokens(
        tokenizer=made,
        tokens=token_bytes(made),
        eos_ids=(made.convert_tokens_to_ids(END),),
        thinking=thinking,
    )


def prompt_of(
    messages: Sequence[Mapping[str, Any]], chat: ChatTokens, prompt_id: str = "p"
) -> Prompt:
    ids = chat.encode_chat([dict(one) for one in messages], ())
    return Prompt(prompt_id, tuple(dict(m) for m in messages), tuple(ids), "42", "t")


def said(chat: ChatTokens, text: str | Sequence[int], *, ends: bool = True) -> Response:
    """What an engine has sampled: the tokens of a text, or these, and the end token."""
    ids = list(chat.encode(text)) if isinstance(text, str) else list(text)
    ids += [chat.eos_ids[0]] * ends
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Response("call", 0, np.array(ids, np.int64), logprobs, "stop" if ends else "length", 3)
