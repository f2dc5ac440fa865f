"""Token id -> the bytes it stands for, so that offsets are counted on the sampled ids and nothing
is re-encoded.

Two kinds of tokenizer cover the models of the field: byte-level BPE (Qwen, Llama-3: every byte has
a printable stand-in of the GPT-2 alphabet) and sentencepiece with byte fallback (a space is U+2581,
a lone byte ``<0x0A>``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.thinking import ThinkingTags, find_tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_IDS = 1 << 24  # vocabularies have at most some 2 ** 18
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


@dataclass(frozen=True)
class TokenBytes:
    """``table[id]`` are the bytes of token ``id``; ids beyond the table (padding of the vocabulary)
    stand for none. ``thinking``: what opens and ends the thinking, where the tokenizer has an
    end-of-thinking token.
    """

    table: tuple[bytes, ...]
    thinking: ThinkingTags | None = None

    def __getitem__(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""

    def pieces(self, token_ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """Return the bytes of each token."""
        return [self[int(token_id)] for token_id in token_ids]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """Return the table of a Hugging Face tokenizer (fast), read once from its JSON.

    A special or added token stands for its own content. The first token of a sentencepiece response
    keeps its leading space: a response continues a prompt. Raises :class:`UserError` for another
    kind of tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} has no fast backend; save the model with its "
            "tokenizer.json"
        )
    spec = json.loads(backend.to_str())
    check_ids(spec, "the tokenizer")
    to_bytes = {"byte_level": _byte_level, "sentencepiece": _sentencepiece}[_kind(spec)]
    pieces = {index: to_bytes(piece) for piece, index in _vocabulary(spec["model"])}
    pieces |= {token["id"]: token["content"].encode() for token in spec["added_tokens"]}
    table = tuple(
        pieces.get(index, b"") for index in range(max(pieces, default=-1) + 1)
    )
    return TokenBytes(
        table, find_tags({token["content"] for token in spec["added_tokens"]})
    )


def check_ids(spec: dict[str, Any], source: str) -> None:
    """Raise :class:`UserError` when a ``tokenizer.json`` has an id of ``MOST_IDS`` or more."""
    model = spec.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    for index in vocabulary.values() if isinstance(vocabulary, dict) else ():
        if not isinstance(index, int) or index >= MOST_IDS:
            raise UserError(
                f"{source} has a token with the id {repr(index)[:40]}; ids are numbers below "
                f"{MOST_IDS}"
            )


def _kind(spec: dict[str, Any]) -> str:
    decoders = {step["type"]: step for step in _steps(spec.get("decoder"), "decoders")}
    if "ByteLevel" in decoders:
        return "byte_level"
    if "ByteFallback" in decoders or "Metaspace" in decoders:
        return "sentencepiece"
    names = ", ".join(decoders) or "none"
    raise UserError(
        f"tokenizer decoder ({names}) is neither byte-level BPE nor sentencepiece; other kinds "
        "are unknown"
    )


def _steps(node: dict[str, Any] | None, children: str) -> Sequence[dict[str, Any]]:
    if node is None:
        return ()
    return node[children] if node["type"] == "Sequence" else (node,)


def _vocabulary(model: dict[str, Any]) -> Iterable[tuple[str, int]]:
    if isinstance(model["vocab"], dict):
        return model["vocab"].items()
    return (
        (piece, index) for index, (piece, _) in enumerate(model["vocab"])
    )  # unigram: [piece, score]


def _byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # a piece that was added in plain text
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    return (
        bytes([int(byte[1], 16)]) if byte else piece.replace(_WORD_START, " ").encode()
    )


def _gpt2_alphabet() -> dict[int, int]:
    """Return GPT-2's stand-in of each byte: printable Latin-1 bytes are themselves, the others
    follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {
        0x100 + i: byte for i, byte in enumerate(others)
    }


_TO_LATIN_1 = _gpt2_alphabet()
