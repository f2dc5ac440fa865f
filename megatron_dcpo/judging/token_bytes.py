"""Map each token id to the bytes it stands for, so that offsets are counted on the sampled ids and
nothing is re-encoded.

Two kinds of tokenizer cover the usual models: byte-level BPE (Qwen, Llama-3: every byte has
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

MOST_IDS = 1 << 24  # vocabularies have at most about 2 ** 18
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of tokens: ``table[id]`` holds those of token ``id``. Ids beyond the table, which
    pad the vocabulary, have no bytes. ``thinking`` holds the tags that open and end the thinking,
    if the tokenizer has an end-of-thinking token.
    """

    table: tuple[bytes, ...]
    thinking: ThinkingTags | None = None

    def __getitem__(self, token_id: int) -> bytes:
        if 0 <= token_id < len(self.table):
            return self.table[token_id]
        return b""

    def pieces(self, token_ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """Return the bytes of each token."""
        return [self[int(token_id)] for token_id in token_ids]


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """Return the table of a Hugging Face tokenizer (fast), read once from its JSON.

    A special or added token stands for its content. The first token of a sentencepiece response
    keeps its leading space, because a response continues a prompt. Raises :class:`UserError` for
    another kind of tokenizer.
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
    added = set()
    for token in spec["added_tokens"]:
        pieces[token["id"]] = token["content"].encode()
        added.add(token["content"])
    size = max(pieces, default=-1) + 1
    table = tuple(pieces.get(index, b"") for index in range(size))
    return TokenBytes(table, find_tags(added))


def check_ids(spec: dict[str, Any], source: str) -> None:
    """Raise :class:`UserError` if a ``tokenizer.json`` has an id of ``MOST_IDS`` or more."""
    model = spec.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict):
        return
    for index in vocabulary.values():
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
        "are not supported"
    )


def _steps(node: dict[str, Any] | None, children: str) -> Sequence[dict[str, Any]]:
    if node is None:
        return ()
    if node["type"] == "Sequence":
        return node[children]
    return (node,)


def _vocabulary(model: dict[str, Any]) -> Iterable[tuple[str, int]]:
    if isinstance(model["vocab"], dict):
        return model["vocab"].items()
    # a unigram model, whose vocabulary is a list of [piece, score]
    return ((piece, index) for index, (piece, _) in enumerate(model["vocab"]))


def _byte_level(piece: str) -> bytes:
    try:
        return piece.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:  # a piece that was added as plain text
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece)
    if byte:
        return bytes([int(byte[1], 16)])
    return piece.replace(_WORD_START, " ").encode()


def _gpt2_alphabet() -> dict[int, int]:
    """Map GPT-2's stand-in characters to bytes: printable Latin-1 characters stand for themselves,
    and those from U+0100 on for the other bytes in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: byte for byte in printable}
    for position, byte in enumerate(others):
        alphabet[0x100 + position] = byte
    return alphabet


_TO_LATIN_1 = _gpt2_alphabet()
