"""The model's state at the end of a judged answer, just before the number of its confidence: what a
linear probe reads (``probe.py``).

``states.safetensors`` next to ``samples.jsonl`` holds a row for each finished response, in fp32,
and the names of the responses with a digest of their texts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.evaluation.before_number import BeforeNumber, RenderedAs, tokens_of_numbers
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.runtime.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FILE = "states.safetensors"
_TENSOR = "states"
_NAMES = "responses"
_TEXTS = "texts"
_AT_ONCE = 64  # sequences of a forward pass


def keep_states(
    samples: Sequence[Sample], model: PreTrainedModel, model_dir: str, rendered_as: RenderedAs
) -> list[Sample]:
    """Return the samples with the model's state behind each finished answer: that of the last
    layer, after the final norm, at the last token before the number.
    """
    from megatron_dcpo.rollout.tokens import load_tokenizer

    tokenizer = load_tokenizer(model_dir)
    opening, _ = tokens_of_numbers(tokenizer, rendered_as.marker, decimals=2)
    before_number = BeforeNumber(
        tokenizer=tokenizer,
        rendered_as=rendered_as,
        opening=opening,
        most_tokens=model.config.get_text_config().max_position_embeddings,
    )
    token_ids = before_number.token_ids(samples)
    known = [ids for ids in token_ids if ids is not None]
    rows = iter(last_states(model, known))
    return [
        sample if ids is None else replace(sample, state=next(rows))
        for sample, ids in zip(samples, token_ids, strict=True)
    ]


def last_states(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the state [h] of the last layer, after the final norm, at the last token of each
    sequence, float32.
    """
    found: list[np.ndarray | None] = [None] * len(sequences)
    # similar lengths together: less padding
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    for start in range(0, len(order), _AT_ONCE):
        rows = order[start : start + _AT_ONCE]
        states = _states_of_batch(model, [sequences[row] for row in rows])
        for row, state in zip(rows, states, strict=True):
            found[row] = state
    return [state for state in found if state is not None]


def _states_of_batch(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> Iterator[np.ndarray]:
    import torch

    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    device = next(model.parameters()).device
    with torch.no_grad():
        hidden = model.base_model(
            ids.to(device), attention_mask=mask.to(device), use_cache=False
        ).last_hidden_state
    for row, tokens in enumerate(sequences):
        yield hidden[row, len(tokens) - 1].float().cpu().numpy()


# ---------------------------------------------------------------------------------------- the file


def write_states(samples: Sequence[Sample], samples_file: str | Path) -> None:
    """Write the states of the samples that have one next to the file of the samples."""
    from safetensors.numpy import save

    kept = [sample for sample in samples if sample.state is not None]
    if not kept:
        return
    states = np.stack([sample.state for sample in kept if sample.state is not None])
    names = json.dumps([sample.name for sample in kept])
    texts = json.dumps([_digest(sample) for sample in kept])
    metadata = {_NAMES: names, _TEXTS: texts}
    content = save({_TENSOR: states.astype(np.float32)}, metadata=metadata)
    write_atomically(Path(samples_file).with_name(FILE), content)


def with_states(samples: Sequence[Sample], samples_file: str | Path) -> list[Sample]:
    """Return the samples with the states that are next to their file. Raises :class:`UserError` if
    there are none, or of other responses.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(samples_file).with_name(FILE)
    if not path.is_file():
        raise UserError(
            f"{path} is missing: these responses were sampled without the model's states; keep "
            "them with dcpo evaluate --model DIR --keep states"
        )
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            names = json.loads(metadata[_NAMES])
            # files of earlier releases do not say it
            texts = json.loads(metadata.get(_TEXTS, json.dumps([None] * len(names))))
            states = file.get_tensor(_TENSOR)
    except (OSError, SafetensorError, LookupError, ValueError) as error:
        raise UserError(f"{path}: not a file of states ({one_line(error, 200)})") from None
    if (
        states.ndim != 2
        or not len(names) == len(texts) == len(states)
        or not np.isfinite(states).all()
    ):
        raise UserError(f"{path}: {len(names)} responses with states {list(states.shape)}")
    row_of = {name: row for row, name in enumerate(names)}
    found = []
    for sample in samples:
        row = row_of.get(sample.name)
        known = row is not None and texts[row] in (None, _digest(sample))
        found.append(replace(sample, state=states[row]) if known else sample)
    missing = sum(sample.state is None for sample in found)
    finished = sum(sample.response.finish_reason == "stop" for sample in samples)
    if missing > len(samples) - finished:
        raise UserError(
            f"{path} has the states of {len(samples) - missing} of {finished} finished responses, "
            "so it is of other ones; keep those of these with dcpo evaluate --model DIR --keep "
            "states"
        )
    return found


def _digest(sample: Sample) -> str:
    text = sample.response.text or ""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
