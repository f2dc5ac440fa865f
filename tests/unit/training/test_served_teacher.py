"""What a served teacher is asked: each segment behind its own context; a server that fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megatron_dcpo.errors import UserError
from megatron_dcpo.training.served_teacher import ServedTeacher
from megatron_dcpo.training.trainer import Trainer
from megatron_dcpo.types import TrainingSample
from tests.helpers.paths import EXAMPLES
from tests.helpers.samplers import one_rank
from tests.helpers.samples import bare
from tests.helpers.teacher_server import TeacherServer, serving

TEACHER = EXAMPLES / "lab" / "qwen3" / "policy"


def trainer_of(samples: list[TrainingSample]) -> Trainer:
    """What deals all samples to this rank."""
    dealt = SimpleNamespace(
        deal=lambda samples: (list(range(len(samples))), []),
        topology=SimpleNamespace(dp_rank=0),
    )
    return cast(Trainer, dealt)


def read(teacher: ServedTeacher, samples: list[TrainingSample]) -> dict[int, np.ndarray]:
    with one_rank(), teacher.opened() as reading:
        return reading(trainer_of(samples), samples)


def test_each_segment_is_read_behind_its_own_context() -> None:
    server = TeacherServer(TEACHER)
    plain = bare([7, 8], [1, 2, 3])
    response = dataclasses.replace(
        plain.response, contexts=((0, 2), (2, 4)), context_ids=np.array([7, 8, 9, 10, 11, 12])
    )
    segments = dataclasses.replace(plain, response=response)
    with serving(server) as url:
        found = read(ServedTeacher(url), [plain, segments])
    assert sorted(server.prompts) == sorted([[7, 8, 1, 2, 3], [7, 8, 1, 2], [9, 10, 11, 12, 3]])
    for sample, row in zip([plain, segments], found.values(), strict=True):
        expected = []
        for sequence in sample.sequences:
            with torch.no_grad():
                logits = server.model(torch.tensor(sequence.input_ids)[None]).logits[0]
            logprobs = logits.log_softmax(-1).numpy()
            places = sequence.places
            expected += logprobs[places, sequence.input_ids[places + 1]].tolist()
        np.testing.assert_allclose(row, expected, rtol=1e-4)


def gone(reply: dict[str, Any]) -> dict[str, Any]:
    return {"choices": []}


def test_a_server_that_fails_ends_the_run_with_a_line_that_names_it() -> None:
    server = TeacherServer(Path(TEACHER), spoil=gone)
    with serving(server) as url, pytest.raises(UserError, match="--resume auto") as refused:
        read(ServedTeacher(url, attempts=2), [bare([7], [1, 2])])
    assert url in str(refused.value)
    assert len(server.prompts) == 2, "a request is repeated"
