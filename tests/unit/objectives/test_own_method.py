"""A method of the user's: what it does wrong is named with its file and line, before a rollout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import ObjectiveConfig, build_method

RIGHT = """
    A = R - R.mean()
    return c, R, c, A, 0 * A
"""
WRONG = {
    "two arrays": ("    return R, c\n", "must return 5 arrays"),
    "other lengths": ("    return c, R, c, R[:1], R\n", r"\(4,\), \(4,\), \(4,\), \(1,\)"),
    "nothing": ("    return None\n", "must return 5 arrays"),
    "a mistake": ("    return R / options.nothing\n", r"mine\.py, line 4, in score"),
    "a mistake in a library": (
        "    import json\n    return json.loads('{')\n",
        r"mine\.py, line 5, in score",
    ),
    "words": ("    return [['a'] * 4] * 5\n", "must return 5 arrays"),
}


def method(directory: Path, body: str) -> ObjectiveConfig:
    path = directory / "mine.py"
    path.write_text(
        "from megatron_dcpo.objectives import Method\n\n"
        f"def score(R, c, logprob, options):\n{body.lstrip(chr(10))}\n"
        "METHOD = Method(score_group=score)\n"
    )
    return ObjectiveConfig(name=f"{path}:METHOD")


def test_a_method_that_scores_is_taken(tmp_path: Path) -> None:
    build_method(method(tmp_path, RIGHT))


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_before_a_rollout(tmp_path: Path, case: str) -> None:
    body, named = WRONG[case]
    with pytest.raises(UserError, match=named) as raised:
        build_method(method(tmp_path, body))
    assert "mine.py" in str(raised.value)


def test_a_file_that_python_cannot_read_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.py, line 4"):
        build_method(method(tmp_path, "    return (\n"))


@pytest.mark.parametrize(
    ("own", "wrong", "named"),
    [
        ('{"gamma": 1.0, "kind": ("a", "b")}', "gama", "'gamma'"),
        ('{"gamma": 1.0, "kind": ("a", "b")}', "zzz", "gamma, kind"),
        ("{}", "gamma", "no options"),
        ('{"gamma": 1.0}', "lam", "write objective.lam"),
    ],
)
def test_a_wrong_option_of_ones_method_names_the_valid_ones(
    tmp_path: Path, own: str, wrong: str, named: str
) -> None:
    config = method(tmp_path, RIGHT)
    file = tmp_path / "mine.py"
    file.write_text(file.read_text().replace("=score)", f"=score, own_options={own})"))
    with pytest.raises(UserError, match=rf"objective\.options\.{wrong}: ") as refused:
        build_method(ObjectiveConfig(name=config.name, options={wrong: 2.0}))
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
