"""``examples/elsewhere``: DCPO's two advantages through the seams of TRL, verl and prime-rl. The
packages are used where they are installed, else stand-ins of the names that are imported.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.tokens import load_tokenizer
from tests.helpers.paths import EXAMPLES, QUICKSTART, REPOSITORY

ELSEWHERE = EXAMPLES / "elsewhere"
TOKENIZER = load_tokenizer(QUICKSTART / "policy")
TEXTS = (
    "44 \\boxed{44}\n<conf> Confidence: 0.83",
    "43 \\boxed{43}\n<conf> Confidence: 0.90",
    "44 \\boxed{44}\n<conf> Confidence: 0.10",
    "no",
)
IDS = [[*TOKENIZER.encode(text), TOKENIZER.eos_token_id] for text in TEXTS]
# a reasoning token and the last one of each response: correctness centred and divided by its std;
# -|c - (.5 R + .25)| (and -1 for none) likewise
REASONING = np.array([1.0, -1.0, 1.0, -1.0])
CALIBRATION = -np.array([0.83 - 0.75, 0.90 - 0.25, 0.75 - 0.10, 1.0])
CALIBRATION = CALIBRATION - CALIBRATION.mean()
CONFIDENCE = CALIBRATION / CALIBRATION.std()


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples import one another by name, as in a folder of the user's."""
    monkeypatch.syspath_prepend(str(ELSEWHERE))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("dcpo", "verl_dcpo", "prime_rl_dcpo"):
            del sys.modules[name]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Put a module of these members, and the packages above it, into the imported ones."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        if count > 1:
            parent = sys.modules[".".join(parts[: count - 1])]
            setattr(parent, parts[count - 1], sys.modules[path])
    for member, value in members.items():
        monkeypatch.setattr(sys.modules[name], member, value, raising=False)


def check(advantages: list[np.ndarray]) -> None:
    for index, row in enumerate(advantages):
        assert row[0] == pytest.approx(REASONING[index], abs=1e-4)
        assert row[-1] == pytest.approx(CONFIDENCE[index], abs=1e-4)
        of_blocks = (REASONING[index], CONFIDENCE[index])
        assert all(np.isclose(value, of_blocks, atol=1e-4).any() for value in row)


def test_a_batch_is_judged_and_scored() -> None:
    dcpo = importlib.import_module("dcpo")
    scored = dcpo.score(
        IDS,
        answers=["44"] * 4,
        groups=["a"] * 4,
        tokens=token_bytes(TOKENIZER),
        eos_ids={TOKENIZER.eos_token_id},
        objective=dcpo.method(),
    )
    check(scored.advantages)
    found = dcpo.metrics(scored.judgements)
    assert found["reward/accuracy"] == 0.5
    assert found["format/violation_rate"] == 0.25
    whole = dcpo.padded(scored.advantages, 20)
    assert whole.shape == (4, 20)
    assert whole[3, len(IDS[3]) :].tolist() == [0.0] * (20 - len(IDS[3]))


def test_verls_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    """By verl's own registry, if it is installed."""
    import torch

    if find_spec("verl") is None:
        registry: dict[str, Any] = {}
        stand_in(monkeypatch, "verl.trainer.ppo.core_algos", ADV_ESTIMATOR_REGISTRY=registry)
    verl_dcpo = importlib.import_module("verl_dcpo")
    verl_dcpo.install(str(QUICKSTART / "policy"))
    from verl.trainer.ppo import core_algos

    width = max(map(len, IDS)) + 2
    responses = torch.zeros(4, width, dtype=torch.long)
    mask = torch.zeros(4, width, dtype=torch.long)
    for index, ids in enumerate(IDS):
        responses[index, : len(ids)] = torch.tensor(ids)
        mask[index, : len(ids)] = 1
    advantages, returns = core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"](
        token_level_rewards=torch.zeros(4, width),
        response_mask=mask,
        config=None,
        index=np.array(["uid"] * 4),
        batch={"responses": responses},
        non_tensor_batch={"reward_model": np.array([{"ground_truth": "44"}] * 4, dtype=object)},
    )
    assert torch.equal(advantages, returns)
    assert not advantages[mask == 0].any()
    rows = [row[: len(ids)].numpy() for row, ids in zip(advantages, IDS, strict=True)]
    check(rows)


def test_prime_rls_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On traces of two nodes, a prompt and what was sampled."""
    assigned: dict[int, list[float]] = {}
    if find_spec("prime_rl") is not None:
        pytest.skip("prime-rl is installed: this test has stand-ins for its traces")
    stand_in(
        monkeypatch,
        "prime_rl.orchestrator.algo.base",
        iter_trainable_traces=lambda episodes: [
            (episode, trace) for episode in episodes for trace in episode.traces
        ],
    )
    stand_in(
        monkeypatch,
        "prime_rl.orchestrator.algo",
        GRPOAlgorithm=object,
        ALGORITHM_CLASSES={},
        assign_advantages=lambda trace, values: assigned.update({trace.id: values}),
    )
    prime = importlib.import_module("prime_rl_dcpo")
    algorithm = prime.install(str(QUICKSTART / "policy"))()
    traces = [
        SimpleNamespace(
            id=index,
            nodes=[
                SimpleNamespace(token_ids=[1, 2], mask=[False, False]),
                SimpleNamespace(token_ids=ids, mask=[True] * len(ids)),
            ],
            task=SimpleNamespace(data=SimpleNamespace(answer="44")),
        )
        for index, ids in enumerate(IDS)
    ]
    asyncio.run(algorithm.score_group([SimpleNamespace(traces=traces)]))
    check([np.array(assigned[index]) for index in range(4)])


def test_trls_trainer(tmp_path: Path) -> None:
    """Two steps of the quickstart's policy."""
    pytest.importorskip("trl", reason="TRL is not installed here (pip install trl)")
    subprocess.run(
        [sys.executable, "trl_dcpo.py", "--steps", "2", "--out", tmp_path],
        cwd=ELSEWHERE,
        check=True,
        capture_output=True,
        timeout=280,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
    )
    history = json.loads((tmp_path / "log_history.json").read_text())
    assert history[0]["calibration/ece"] > 0
    assert history[0]["grad_norm"] > 0


def test_each_is_short() -> None:
    for path in ELSEWHERE.glob("*.py"):
        assert len(path.read_text().splitlines()) < 120, path.name
