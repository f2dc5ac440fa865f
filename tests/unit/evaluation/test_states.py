"""The model's states behind answers: their file, the probe that reads them, and the stack of probe
and log-probs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.calibration import brier
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import posthoc
from megatron_dcpo.evaluation.probe import cross_fitted_logits, fit_probe, probe_logits
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.evaluation.states import FILE, with_states, write_states
from tests.helpers.evaluated import make_sample

WIDTH = 12
KINDS = ("easy", "hard")


def answers(problems: int = 80, repeats: int = 3) -> list[Sample]:
    """What is right shows half in the log-prob and half in the state: each knows a part of it."""
    generator = np.random.default_rng(0)
    direction = generator.normal(size=WIDTH)
    samples = []
    for problem in range(problems):
        for repeat in range(repeats):
            of_state, of_logprob = generator.normal(size=2)
            correct = float(of_state + of_logprob + 0.3 * generator.normal() > 0)
            state = of_state * direction + 0.1 * generator.normal(size=WIDTH)
            sample = make_sample(
                task="toy",
                prompt_id=f"toy/{problem}",
                sample_index=repeat,
                kind=KINDS[problem % 2],
                correct=correct,
                boundary=10,
                length=20,
                reasoning_logprob=-np.exp(-of_logprob),
            )
            samples.append(replace(sample, state=state.astype(np.float32)))
    return samples


SAMPLES = answers()


def test_a_file_gives_the_states_back(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    write_states(SAMPLES, file)
    bare = [replace(sample, state=None) for sample in reversed(SAMPLES)]
    found = with_states(bare, file)
    for before, after in zip(reversed(SAMPLES), found, strict=True):
        np.testing.assert_array_equal(before.state, after.state)


def test_states_of_other_responses_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    write_states(SAMPLES[:30], file)
    with pytest.raises(UserError, match=FILE):
        with_states([replace(sample, state=None) for sample in SAMPLES], file)


def test_states_of_earlier_texts_are_refused(tmp_path: Path) -> None:
    """A model that was sampled anew leaves other answers under the same names."""
    file = tmp_path / "samples.jsonl"
    write_states(SAMPLES, file)
    first = SAMPLES[0]
    other = replace(first, state=None, response=replace(first.response, text="another answer"))
    with pytest.raises(UserError, match=FILE):
        with_states([other, *(replace(sample, state=None) for sample in SAMPLES[1:])], file)


@pytest.mark.parametrize("content", [b"", b"not a tensor", b"\x08" + 7 * b"\0" + b'{"a":1}x'])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(UserError, match=FILE):
        with_states(SAMPLES, tmp_path / "samples.jsonl")


def test_responses_without_states_name_the_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--keep states"):
        with_states(SAMPLES, tmp_path / "samples.jsonl")
    bare = [replace(sample, state=None) for sample in SAMPLES]
    with pytest.raises(UserError, match="--keep states"):
        posthoc.fit("logistic", bare, "states")


def test_the_stack_knows_more_than_either_source() -> None:
    errors = {}
    for source in ("task", "states", "stack"):
        _, held_out = posthoc.fit("logistic", SAMPLES, source, held_out=0.3)
        stated = [sample.measures.posthoc_confidence for sample in held_out]
        errors[source] = brier(stated, [sample.correct for sample in held_out])
    assert errors["stack"] < min(errors["task"], errors["states"]) - 0.05


@pytest.mark.parametrize("source", ["states", "stack"])
def test_a_predictor_survives_saving(tmp_path: Path, source: str) -> None:
    predictor, _ = posthoc.fit("logistic", SAMPLES, source)
    predictor.save(tmp_path / "fitted.npz")
    again = posthoc.Posthoc.load(tmp_path / "fitted.npz")
    np.testing.assert_allclose(again.predict(SAMPLES[:20]), predictor.predict(SAMPLES[:20]))
    unfinished = replace(SAMPLES[0], state=None)
    assert again.predict([unfinished]) == [None]


def test_a_probe_of_noise_claims_nothing() -> None:
    """On labels that the state says nothing about, the logits of other folds stay near that of the
    share of right answers.
    """
    generator = np.random.default_rng(1)
    states = generator.normal(size=(300, 40))
    correct = (generator.random(300) < 0.5).astype(float)
    problems = [str(index // 3) for index in range(300)]
    assert np.abs(cross_fitted_logits(states, correct, problems)).mean() < 0.5
    own = probe_logits(fit_probe(states, correct, problems), states)
    assert np.abs(own).mean() < 1.0


def test_cross_fitting_leaves_the_problem_out() -> None:
    """Turning the verdicts of one problem changes what others are told, not what it is told."""
    before = posthoc.cross_fitted(SAMPLES, "states", seed=0)
    turned = [
        replace(each, judgement=replace(each.judgement, correct=1 - each.judgement.correct))
        for each in SAMPLES[:3]
    ]
    after = posthoc.cross_fitted([*turned, *SAMPLES[3:]], "states", seed=0)
    np.testing.assert_allclose(np.array(after[:3], float), np.array(before[:3], float), atol=1e-9)
    assert after[3:] != before[3:]
