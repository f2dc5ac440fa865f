"""Tokenizers the tests of the judging share: Qwen's, one sentencepiece-like, one with a token per byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes

QWEN = Path(__file__).parents[3] / "shared" / "data" / "qwen_tokenizer" / "tokenizer.json"
EOS = "<|im_end|>"


@cache
def qwen() -> Tokenizer:
    if not QWEN.is_file():
        pytest.skip("the Qwen tokenizer lies beside the repository (shared/data) only where the project is developed")
    return Tokenizer.from_file(str(QWEN))


@cache
def sentencepiece() -> Tokenizer:
    """Byte fallback, U+2581 for a space, merges that straddle the marker, and ``</s>``: Llama-2's construction."""
    words = ["<conf>", ".<", "}<", "conf", ">", "\u2581Confidence", ":", "\u25810", ".8", "3", "\\boxed{5", "}", "数"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE without merges: a token per byte, EOS is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOS)])
    return tokenizer


@cache
def table_of(tokenizer: Callable[[], Tokenizer]) -> TokenBytes:
    """The bytes of one of the tokenizers above, made once."""
    return token_bytes(tokenizer())
