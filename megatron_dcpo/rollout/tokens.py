"""The tokens of a model directory: its tokenizer, the tokens that end a response, and whether the
model has an embedding of all of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dcpo.data.chat_template import turn_end
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.judging.token_bytes import TokenBytes, check_ids
from megatron_dcpo.rollout.transformers_library import auto_class, redirect_transformers_logging
from megatron_dcpo.runtime.text import read_json_object

logger = logging.getLogger(__name__)

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(model_dir: str | Path) -> Any:  # noqa: ANN401 - transformers' tokenizer
    """Load the tokenizer of a checkpoint directory. Raises :class:`UserError` if there is none, or
    only an unusable one.
    """
    redirect_transformers_logging()
    directory = Path(model_dir)
    spec = directory / "tokenizer.json"
    if spec.is_file():
        # The library would allocate memory for the largest id.
        check_ids(read_json_object(spec), str(spec))
    elif not any(
        (directory / name).is_file() for name in (*_VOCABULARIES, "tokenizer_config.json")
    ):
        # The library would make a tokenizer with a single token.
        raise UserError(
            f"{model_dir} has no tokenizer.json; put the files of the model's tokenizer there"
        )
    try:
        tokenizer = auto_class("AutoTokenizer").from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises plain Exception, readers anything
        raise UserError(f"no usable tokenizer in {model_dir} ({one_line(error, 200)})") from None
    _say_second_template(directory, str(tokenizer.chat_template))
    return tokenizer


@functools.lru_cache(maxsize=64)
def _say_second_template(directory: Path, chat_template: str) -> None:
    """Say once if ``tokenizer_config.json`` has another chat template than the one that was read
    from a file beside it: older programs read that one.
    """
    config = directory / "tokenizer_config.json"
    other = read_json_object(config).get("chat_template") if config.is_file() else None
    if isinstance(other, str) and other.strip() != chat_template.strip():
        logger.warning(
            "%s has two chat templates: chat_template.jinja is read, here and by vLLM, and that of "
            "tokenizer_config.json is another; remove the one that is not meant",
            directory,
        )


def read_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the ids that end a response, from ``generation_config.json``, ``config.json``, the
    tokenizer, and the end of a turn in its chat template (``chat_template.turn_end``). Models name
    in one of them what the others lack.

    Raises :class:`UserError` if there is none at all.
    """
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        path = model_dir / file
        named = read_json_object(path).get("eos_token_id") if path.is_file() else None
        if named is None:
            continue
        named = named if isinstance(named, list) else [named]
        if not named or not all(type(one) is int for one in named):
            raise UserError(f"{path}: eos_token_id must be a token id or a list of them")
        ids += named
    ids += _end_of_tokenizer(model_dir)
    if not ids:
        raise UserError(
            f"{model_dir}: no token ends a response: neither generation_config.json nor "
            "config.json names eos_token_id, nor tokenizer_config.json eos_token"
        )
    return tuple(dict.fromkeys(ids))


def check_vocabulary(model_dir: str | Path, vocabulary: TokenBytes, vocab_size: int) -> None:
    """Raise :class:`UserError` if the tokenizer, or a token that ends a response, has ids of which
    a model with ``vocab_size`` embeddings has none, or if no token ends a response.
    """
    if len(vocabulary.table) > vocab_size:
        raise UserError(
            f"the tokenizer of {model_dir} has {len(vocabulary.table)} tokens, its config.json a "
            f"vocab_size of {vocab_size}; give the model its own tokenizer"
        )
    for token in read_eos_token_ids(Path(model_dir)):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{model_dir}: eos_token_id {token} is not below the vocab_size of {vocab_size} "
                "in config.json"
            )


def _end_of_tokenizer(model_dir: Path) -> Iterator[int]:
    """Yield the id of the tokenizer's end token, if it names one, and the one with which its chat
    template ends a turn.
    """
    path = model_dir / "tokenizer_config.json"
    if not path.is_file():
        return
    has_vocabulary = any((model_dir / name).is_file() for name in _VOCABULARIES)
    if not has_vocabulary and read_json_object(path).get("eos_token") is None:
        # the directory of a policy of token ids has settings of a tokenizer at most
        return
    tokenizer = load_tokenizer(model_dir)
    end = turn_end(tokenizer)
    if end is not None:
        yield end
    name = read_json_object(path).get("eos_token")
    if isinstance(name, dict):
        name = name.get("content")
    if name is None:
        return
    if not isinstance(name, str):
        raise UserError(f"{path}: eos_token must be a token, not {name!r:.60}")
    token = tokenizer.convert_tokens_to_ids(name)
    if token is None:
        raise UserError(f"{path}: eos_token {name!r:.60} is not a token of the tokenizer")
    yield token
