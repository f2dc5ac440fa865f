"""Training samples of tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample


def bare(
    prompt_ids: Iterable[int], response_ids: Iterable[int], prompt_id: str = "p", index: int = 0
) -> TrainingSample:
    """Return a response with nothing but its tokens: all of them reason, and nothing was right."""
    tokens = np.asarray(list(response_ids), np.int64)
    prompt = Prompt(prompt_id, (), tuple(map(int, prompt_ids)), "", "")
    response = Response(prompt_id, index, tokens, np.zeros(len(tokens), np.float32), "stop", 0)
    return TrainingSample(
        prompt, response, Judgement(prompt_id, 0.0, None, "missing", len(tokens), len(tokens))
    )
