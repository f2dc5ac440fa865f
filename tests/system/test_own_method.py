"""A method of one's own, in a file outside the package: it trains by its path, and a bad path is
one clear line.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, metrics, run, without_clocks

METHOD = '''
import numpy as np

from megatron_dcpo.objectives.advantages import hybrid_target, normalize
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import CLIPPED_LOSS, COMMON, REASONING_ADVANTAGE


def score_group(R, c, logprob, options):
    """Return DCPO's scores with R_c = -|c - t|^gamma."""
    target = hybrid_target(R, options)
    gamma = options.options["gamma"]
    R_c = np.where(np.isnan(c), options.malformed_penalty, -np.abs(np.nan_to_num(c) - target) ** gamma)
    A_r, A_c = (normalize(x, options.advantage_normalization_reasoning, options) for x in (R, R_c))
    return target, R, R_c, A_r, A_c


METHOD = Method(
    score_group,
    reads=COMMON | CLIPPED_LOSS | REASONING_ADVANTAGE | {"lam", "malformed_penalty"},
    own_options={"gamma": 1.0},
)
NUMBER = 3
'''


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_method.py").write_text(METHOD)
    return tmp_path


def train(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``dcpo train`` in ``directory``, which is no checkout."""
    policy = f"model.path={QUICKSTART / 'policy'}"
    arguments = (
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        policy,
        *SMALL,
        "training.steps=2",
        *overrides,
    )
    return run(*arguments, cwd=directory, PYTHONPATH=str(REPOSITORY))


def test_it_trains_and_its_option_counts(directory: Path) -> None:
    """With gamma 1 it is DCPO to the last digit; with gamma 2 the confidence is rewarded
    otherwise.
    """
    own = "objective.name=my_method.py:METHOD"
    runs = {
        "dcpo": (),
        "one": (own, "objective.options.gamma=1.0"),
        "two": (own, "objective.options.gamma=2.0"),
    }
    for name, overrides in runs.items():
        done = train(directory, f"run_dir={name}", *overrides)
        assert done.returncode == 0, done.stderr[-2000:]
    dcpo, one, two = (without_clocks(metrics(directory / name)) for name in runs)
    assert len(one) == 2
    assert one == dcpo
    assert two[0]["reward/accuracy"] == one[0]["reward/accuracy"], "the same responses"
    assert two[0]["reward/calibration"] > one[0]["reward/calibration"]
    assert two[0]["grad_norm/total"] != one[0]["grad_norm/total"]
    written = (directory / "two" / "config.yaml").read_text()
    assert "name: my_method.py:METHOD" in written
    assert "gamma: 2.0" in written


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("objective.name=nowhere.py:METHOD",),
            "objective.name=nowhere.py:METHOD: no such file nowhere.py (looked for in",
        ),
        (
            ("objective.name=my_method.py:METHODS",),
            "my_method.py has no 'METHODS'; did you mean 'METHOD'?",
        ),
        (
            ("objective.name=my_method.py:NUMBER",),
            "expected a Method of megatron_dcpo.objectives, got 3",
        ),
        (("objective.name=my_method.py:a-name",), "expected file.py:name or package.module:name"),
        (
            ("objective.name=no.such.module:METHOD",),
            "no module named 'no'; install it or set PYTHONPATH",
        ),
        (
            ("objective.name=my_method.py:METHOD", "objective.options.gama=2"),
            "objective.options.gama",
        ),
        (
            ("objective.name=my_method.py:METHOD", "objective.options.gamma=much"),
            "objective.gamma='much': expected a value like its default, 1.0",
        ),
    ],
)
def test_a_bad_path_or_option_is_one_line(
    directory: Path, overrides: tuple[str, ...], message: str
) -> None:
    done = train(directory, "--dry-run", "run_dir=run", *overrides)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
