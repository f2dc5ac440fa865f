"""Tokenizers that tests share: Qwen's, one sentencepiece-like, two with a token per byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from tests.helpers.data import real

EOS = "<|im_end|>"
THINK = ("<think>", "</think>")


@cache
def qwen() -> Tokenizer:
    return Tokenizer.from_file(str(real("qwen_tokenizer/tokenizer.json")))


@cache
def sentencepiece() -> Tokenizer:
    """Byte fallback, U+2581 for a space, merges that straddle the marker, and ``</s>``: Llama-2's
    construction.
    """
    words = [
        "<conf>",
        ".<",
        "}<",
        "conf",
        ">",
        "\u2581Confidence",
        ":",
        "\u25810",
        ".8",
        "3",
        "\\boxed{5",
        "}",
        "数",
    ]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE without merges: a token per byte, EOS is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS)])
    return tokenizer


def save_qwen3(directory: Path) -> Path:
    """Qwen's tokenizer with the two tokens of thinking that Qwen3's has, and the switch of its chat
    template.
    """
    spec = json.loads(real("qwen_tokenizer/tokenizer.json").read_text())
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    spec["added_tokens"] += [
        {"id": 151667 + n, "content": tag, **plain} for n, tag in enumerate(THINK)
    ]
    shutil.copytree(real("qwen_tokenizer/tokenizer.json").parent, directory, dirs_exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    with (directory / "chat_template.jinja").open("a") as template:
        template.write(
            "{% if enable_thinking is defined and enable_thinking is false "
            "%}<think>\n\n</think>\n\n{% endif %}"
        )
    return directory


@cache
def table_of(tokenizer: Callable[[], Tokenizer]) -> TokenBytes:
    """The bytes of one of the tokenizers above, made once."""
    return token_bytes(tokenizer())


class ByteTokenizer:
    """One token per byte; a chat template as a Python function that records the options it was
    given.
    """

    def __init__(self, chat_template: str | None = "{{ messages }}{{ enable_thinking }}") -> None:
        self.chat_template = chat_template
        self.options: dict[str, Any] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] * add_special_tokens + list(text.encode())

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        self.options = options
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
