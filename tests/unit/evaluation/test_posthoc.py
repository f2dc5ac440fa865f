"""Post-hoc predictors: they learn what is there, split by problem, survive saving, and name what is
missing.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from megatron_dcpo.cli import main
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation import posthoc_predictors
from megatron_dcpo.evaluation.fitting import PosthocFit, fit_on_files
from megatron_dcpo.evaluation.samples import Sample, mean_entropy, read_samples, write_samples
from megatron_dcpo.evaluation.scoring import confidences_of, scores_of_arms
from tests.helpers.evaluated import changed, make_sample


def scores(samples: list[Sample], kind: str = "posthoc") -> dict[str, float]:
    return scores_of_arms(samples, {kind: confidences_of(samples, kind)})[kind]


def world(problems: int = 240, repeats: int = 5, seed: int = 0) -> list[Sample]:
    """Over-confident samples: difficulty shows in the log-probs, right with p, says sigmoid(3 logit
    p).
    """
    generator = np.random.default_rng(seed)
    samples = []
    for problem in range(problems):
        p = generator.uniform(0.1, 0.9)
        for repeat in range(repeats):
            stated = 1 / (1 + np.exp(-3 * np.log(p / (1 - p))))
            top = np.log(
                np.sort(generator.dirichlet(np.full(20, 1 - p + 0.05), size=30))[:, ::-1] + 1e-9
            )
            samples.append(
                make_sample(
                    task="toy",
                    prompt_id=f"toy/{problem}",
                    sample_index=repeat,
                    correct=float(generator.random() < p),
                    confidence=float(stated),
                    status="ok",
                    token_confidence=float(stated),
                    min_logprob=-1.0,
                    length=30,
                    features=posthoc_predictors.features(top),
                )
            )
    return samples


SAMPLES = world()


@pytest.mark.parametrize("method", ["temperature", "platt", "isotonic"])
def test_scaling_repairs_over_confidence(method: str) -> None:
    predictor, held_out = posthoc_predictors.fit(method, SAMPLES, "verbal", held_out=0.3)
    before, after = scores(held_out, "verbal"), scores(held_out)
    assert after["ece"] < before["ece"] - 0.05
    assert after["brier"] < before["brier"]
    if method == "temperature":
        assert float(predictor.weights["temperature"]) == pytest.approx(3.0, rel=0.25)
    if method == "platt":
        assert float(predictor.weights["slope"]) == pytest.approx(1 / 3, rel=0.25)
        assert float(predictor.weights["intercept"]) == pytest.approx(0.0, abs=0.3)
    if method == "isotonic":
        fitted = [
            s
            for s in SAMPLES
            if not posthoc_predictors.is_held_out("toy/" + s.prompt.prompt_id, 0.3, 0)
        ]
        peer = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(
            [s.judgement.confidence for s in fitted], [float(s.correct) for s in fitted]
        )
        expected = peer.predict([s.judgement.confidence for s in held_out])
        np.testing.assert_allclose(
            [s.measures.posthoc_confidence for s in held_out], expected, atol=1e-12
        )


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_the_reasonings_logprob_is_scaled_to_a_confidence(method: str, tmp_path: Path) -> None:
    """In nats, far below what a logit of a probability could tell apart: sums near -60
    against -40.
    """
    generator = np.random.default_rng(3)
    samples = []
    for sample in SAMPLES:
        nats = -50 + 10 * (1 if sample.correct else -1) + 8 * generator.standard_normal()
        samples.append(changed(sample, reasoning_logprob=min(0.0, float(nats))))
    predictor, held_out = posthoc_predictors.fit(method, samples, "logprob", held_out=0.3)
    assert scores(held_out)["auroc"] > 0.9
    assert scores(held_out)["ece"] < 0.08
    predictor.save(tmp_path / "p.npz")
    assert posthoc_predictors.Posthoc.load(tmp_path / "p.npz").predict(held_out) == [
        s.measures.posthoc_confidence for s in held_out
    ]
    assert posthoc_predictors.Posthoc.load(tmp_path / "p.npz").predict([SAMPLES[0]]) == [None], (
        "no tokens, no confidence"
    )
    if method == "platt":  # two normal classes of the same spread: log-odds with slope 2 * 10 / 8^2
        assert float(predictor.weights["slope"]) == pytest.approx(20 / 64, rel=0.2)
    with pytest.raises(UserError, match=r"temperature.*logprob"):
        posthoc_predictors.fit("temperature", samples, "logprob")


def with_logprobs(seed: int = 3) -> list[Sample]:
    """Samples whose reasoning's log-probs tell right from wrong, and longer responses are worse."""
    generator = np.random.default_rng(seed)
    samples = []
    for sample in SAMPLES:
        nats = -3 + 2 * sample.correct + generator.standard_normal()
        length = int(20 + 5 * (not sample.correct) + generator.integers(0, 8))
        samples.append(changed(sample, reasoning_logprob=min(0.0, float(nats)), boundary=length))
    return samples


def test_logistic_reads_log_probs_length_and_what_is_stated(tmp_path: Path) -> None:
    samples = with_logprobs()
    predictor, held_out = posthoc_predictors.fit("logistic", samples, held_out=0.3)
    after = scores(held_out)
    assert after["auroc"] > 0.93
    assert after["ece"] < 0.05
    _, same = posthoc_predictors.fit("isotonic", samples, "logprob", held_out=0.3)
    assert after["brier"] < scores(same)["brier"] - 0.01, (
        "the length and the stated confidence tell more"
    )
    predictor.save(tmp_path / "p.npz")
    assert posthoc_predictors.Posthoc.load(tmp_path / "p.npz").predict(held_out) == [
        s.measures.posthoc_confidence for s in held_out
    ]
    unstated = [changed(s, confidence=None, status="missing") for s in samples]
    assert all(c is not None for c in predictor.predict(unstated)), (
        "a response that states nothing has log-probs"
    )
    assert predictor.predict([SAMPLES[0]]) == [None], "no log-probs, no confidence"


def test_logistic_is_the_peers_regression() -> None:
    """Standardized inputs, L2 penalty 1: scikit-learn's pipeline gives the same probabilities."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    samples = with_logprobs()
    predictor, nothing = posthoc_predictors.fit("logistic", samples, held_out=0.0)
    assert nothing == []
    x = np.array([posthoc_predictors.response_features(s) for s in samples])
    peer = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000, tol=1e-8))
    expected = peer.fit(x, [s.correct for s in samples]).predict_proba(x)[:, 1]
    np.testing.assert_allclose(predictor.predict(samples), expected, atol=1e-6)


INTERCEPTS = {"sums": 4.0, "products": -3.0, "legs": 0.5}
SLOPES = {"sums": -3.0, "products": 2.0, "legs": 0.0}


def planted(tasks: tuple[str, ...] = ("sums", "products", "legs"), seed: int = 5) -> list[Sample]:
    """Responses that are right with a probability whose logit is linear in log(1 - s), with other
    coefficients in each task.
    """
    generator = np.random.default_rng(seed)
    samples = []
    for number in range(1500 * len(tasks)):
        task = tasks[number % len(tasks)]
        nats = -float(np.expm1(generator.uniform(0.2, 2.5)))
        p = planted_probability(task, nats)
        samples.append(
            make_sample(
                prompt_id=f"p{number}",
                kind=task,
                row={"topic": task, "number": number},
                correct=float(generator.random() < p),
                reasoning_logprob=nats,
                boundary=int(generator.integers(10, 20)),
                length=25,
            )
        )
    return samples


def planted_probability(task: str, nats: float) -> float:
    logit = INTERCEPTS[task] + SLOPES[task] * np.log1p(-nats)
    return float(1 / (1 + np.exp(-logit)))


def truth_of(samples: list[Sample]) -> np.ndarray:
    found = []
    for sample in samples:
        nats = sample.measures.reasoning_logprob
        assert nats is not None
        found.append(planted_probability(str(sample.prompt.kind), nats))
    return np.array(found)


def test_the_task_recovers_a_calibration_that_depends_on_it() -> None:
    blind, _ = posthoc_predictors.fit("logistic", planted(), "reasoning", held_out=0.0)
    with_task, _ = posthoc_predictors.fit("logistic", planted(), "task", held_out=0.0)
    new = planted(seed=6)
    truth = truth_of(new)
    errors = {
        name: np.abs(np.array(predictor.predict(new)) - truth).mean()
        for name, predictor in (("blind", blind), ("task", with_task))
    }
    assert errors["task"] < 0.02
    assert errors["blind"] > 0.1
    brier = {
        name: scores(predictor.apply(new))["brier"]
        for name, predictor in (("blind", blind), ("task", with_task))
    }
    assert brier["task"] < brier["blind"] - 0.03
    best = float(np.mean((truth - [s.correct for s in new]) ** 2))
    assert brier["task"] == pytest.approx(best, abs=0.003)


def test_with_one_task_the_fit_is_the_one_without() -> None:
    samples = planted(("sums",))
    blind, _ = posthoc_predictors.fit("logistic", samples, "reasoning", held_out=0.0)
    with_task, _ = posthoc_predictors.fit("logistic", samples, "task", held_out=0.0)
    np.testing.assert_allclose(with_task.predict(samples), blind.predict(samples), atol=1e-7)


def test_a_task_that_was_not_fitted_gets_the_slope_of_all_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    predictor, _ = posthoc_predictors.fit("logistic", planted(), "task", held_out=0.0)
    known = planted(seed=7)[:6]
    w = predictor.weights
    x = np.array([posthoc_predictors.reasoning_features(s) for s in known])
    z = (x - w["mean"]) / w["deviation"]
    of_all = 1 / (1 + np.exp(-(z @ w["slopes"] + w["intercept"])))
    predictor.predict(known)
    assert caplog.records == []
    new = [changed(s, kind="gcd") for s in known[:5]] + [changed(known[5], kind=None)]
    np.testing.assert_allclose(predictor.predict(new), of_all, atol=1e-12)
    (said,) = caplog.records
    assert "6 of 6" in said.getMessage()
    assert "gcd" in said.getMessage()


def test_the_file_says_which_column_and_which_tasks(tmp_path: Path) -> None:
    samples = planted()
    predictor, _ = posthoc_predictors.fit("logistic", samples, "task:topic", held_out=0.0)
    predictor.save(tmp_path / "p.npz")
    read = posthoc_predictors.Posthoc.load(tmp_path / "p.npz")
    assert read.source == "task:topic"
    assert read.weights["tasks"].tolist() == ["legs", "products", "sums"]
    unnamed = [changed(s, kind=None) for s in samples]
    assert read.predict(unnamed) == predictor.predict(samples)
    without = [changed(s, row=None) for s in samples]
    with pytest.raises(UserError, match=r"topic.*kind, benchmark"):
        read.predict(without)


def test_the_benchmark_can_be_the_task() -> None:
    samples = [changed(s, task=s.prompt.kind, kind=None) for s in planted()]
    predictor, _ = posthoc_predictors.fit("logistic", samples, "task:task", held_out=0.0)
    by_kind, _ = posthoc_predictors.fit("logistic", planted(), "task", held_out=0.0)
    assert predictor.predict(samples) == by_kind.predict(planted())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--features", "task", "--task-column", "subject"], "subject"),
        (["--features", "task", "--task-column", "number"], "--task-column"),
        (["--task-column", "kind"], "--task-column"),
        (["--features", "reasoning", "--task-column", "kind"], "--task-column"),
        (["--features", "task", "--kind", "platt"], "--features"),
        (["--features", "task", "--source", "response"], "--source"),
    ],
)
def test_options_of_the_task_that_go_wrong_are_named(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(planted(), tmp_path / "s.jsonl")
    files = ["--samples", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "p.npz")]
    assert main(["calibrate", *files, *options]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "p.npz").exists()


def test_calibrate_with_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_samples(planted(), tmp_path / "s.jsonl")
    files = ["--samples", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "p.npz")]
    brier = {}
    for features in ("reasoning", "task"):
        assert main(["calibrate", *files, "--features", features, "--json"]) == 0
        held_out = json.loads(capsys.readouterr().out)["held_out"]
        brier[features] = held_out["logistic"]["brier"]
    assert brier["task"] < brier["reasoning"] - 0.03
    assert posthoc_predictors.Posthoc.load(tmp_path / "p.npz").source == "task"


def test_calibrate_kind_logprob(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(4)
    samples = [
        changed(s, reasoning_logprob=-20 - 9 * (not s.correct) - generator.random())
        for s in SAMPLES
    ]
    write_samples(samples, tmp_path / "samples.jsonl")
    options = [
        "--samples",
        str(tmp_path / "samples.jsonl"),
        "--kind",
        "logprob",
        "--method",
        "isotonic",
    ]
    assert main(["calibrate", *options, "--out", str(tmp_path / "p.npz"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["held_out"]) == {
        "verbal",
        "token",
        "isotonic",
        "lookup",
    }


def test_confclass_learns_difficulty_from_log_probs() -> None:
    _, held_out = posthoc_predictors.fit("confclass", SAMPLES, held_out=0.3, width=64, epochs=60)
    assert scores(held_out)["auroc"] > 0.65
    assert scores(held_out)["ece"] < 0.15
    _, again = posthoc_predictors.fit("confclass", SAMPLES, held_out=0.3, width=64, epochs=60)
    assert [s.measures.posthoc_confidence for s in again] == [
        s.measures.posthoc_confidence for s in held_out
    ]


def test_targets_are_soft_and_problems_are_not_shared() -> None:
    targets = posthoc_predictors.soft_targets(SAMPLES)
    first = [s.correct for s in SAMPLES[:5]]
    np.testing.assert_allclose(targets[:5], np.mean(first))
    _, held_out = posthoc_predictors.fit("platt", SAMPLES, held_out=0.3)
    outside = {s.prompt.prompt_id for s in held_out}
    assert 0.2 < len(outside) / 240 < 0.4
    assert len(held_out) == 5 * len(outside)


def test_the_network_in_numpy_is_the_network_that_was_trained(tmp_path: Path) -> None:
    import torch

    predictor, held_out = posthoc_predictors.fit("confclass", SAMPLES, "full", width=16, epochs=3)
    w = {name: torch.tensor(np.asarray(value)) for name, value in predictor.weights.items()}
    x = (torch.tensor([s.measures.features for s in held_out]) - w["mean"]) / w["deviation"]
    h = torch.relu(torch.nn.functional.linear(x.float(), w["weight1"], w["bias1"]))
    h = torch.relu(torch.nn.functional.linear(h, w["weight2"], w["bias2"]))
    expected = torch.sigmoid(torch.nn.functional.linear(h, w["weight3"], w["bias3"]))[:, 0]
    np.testing.assert_allclose(
        [s.measures.posthoc_confidence for s in held_out], expected.numpy(), atol=1e-5
    )
    predictor.save(tmp_path / "p.npz")
    assert posthoc_predictors.Posthoc.load(tmp_path / "p.npz").predict(
        held_out
    ) == predictor.predict(held_out)


def test_missing_inputs_give_no_confidence() -> None:
    predictor, _ = posthoc_predictors.fit("platt", SAMPLES, "verbal")
    odd = [
        changed(SAMPLES[0], confidence=None),
        changed(SAMPLES[0], confidence=1.0),
        changed(SAMPLES[0], confidence=0.0),
    ]
    found = predictor.predict(odd)
    assert found[0] is None
    assert all(c is not None and 0 <= c <= 1 for c in found[1:])
    assert predictor.predict([]) == []


def test_errors_are_named(tmp_path: Path) -> None:
    bare = [changed(s, features=None) for s in SAMPLES]
    for arguments, message in (
        (("confclass", bare), "--features"),
        (("platt", [changed(s, correct=1.0) for s in SAMPLES]), "every response is correct"),
        (("platt", SAMPLES[:1]), "more problems"),
        (("guess", SAMPLES), "unknown method 'guess'"),
        (("platt", SAMPLES, "mean"), "it reads verbal, token"),
    ):
        with pytest.raises(UserError, match=message):
            posthoc_predictors.fit(*arguments)
    (tmp_path / "bad.npz").write_bytes(b"PK")
    for name in ("bad.npz", "none.npz"):
        with pytest.raises(UserError, match=name):
            posthoc_predictors.Posthoc.load(tmp_path / name)


def test_features_and_entropy() -> None:
    top = np.log(np.array([[0.5, 0.25], [0.75, 0.125]]))
    found = posthoc_predictors.features(top)
    assert found is not None
    assert len(found) == 60
    assert found[:2] == pytest.approx([np.mean(top[:, 0]), np.mean(top[:, 1])], abs=1e-6)
    assert found[2] == posthoc_predictors.LOWEST_LOGPROB
    assert found[40:42] == pytest.approx(top[1].tolist(), abs=1e-6)
    first = -(0.5 * np.log(0.5) + 2 * 0.25 * np.log(0.25))
    second = -(0.75 * np.log(0.75) + 2 * 0.125 * np.log(0.125))
    assert mean_entropy(top) == pytest.approx((first + second) / 2, abs=1e-12)
    assert mean_entropy(None) is posthoc_predictors.features(None) is None
    assert mean_entropy(np.array([[0.0, -np.inf]])) == pytest.approx(0.0)


@pytest.mark.slow
def test_dcpo_calibrate_fits_and_applies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fit, save, and score the saved predictor on other samples."""
    write_samples(SAMPLES, tmp_path / "train.jsonl")
    other = world(40, seed=1)
    write_samples(other, tmp_path / "test.jsonl")
    out, fit = (
        str(tmp_path / "platt.npz"),
        ["calibrate", "--samples", str(tmp_path / "train.jsonl"), "--method", "platt"],
    )
    assert main([*fit, "--source", "verbal", "--out", out, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["held_out"]
    assert rows["platt"]["ece"] < rows["verbal"]["ece"]
    score = [
        "evaluate",
        "--samples",
        str(tmp_path / "test.jsonl"),
        "--posthoc",
        out,
        "--resamples",
        "0",
    ]
    assert main([*score, "--out", str(tmp_path / "run"), "--json"]) == 0
    overall = json.loads(capsys.readouterr().out)["overall"]
    assert overall["posthoc"]["ece"] < overall["verbal"]["ece"]
    written = read_samples(tmp_path / "run" / "samples.jsonl")
    assert [s.measures.posthoc_confidence for s in written] == posthoc_predictors.Posthoc.load(
        out
    ).predict(other)
    assert main([*fit, "--source", "nothing", "--out", out]) == 2


@pytest.mark.parametrize(
    ("method", "samples", "message"),
    [
        (
            "logistic",
            SAMPLES,
            r"logistic: none of the \d+ responses that are held out has log-probs of its reasoning",
        ),
        (
            "confclass",
            [changed(s, features=None) for s in SAMPLES],
            "held out has features .sample with dcpo evaluate",
        ),
        (
            "platt",
            [changed(s, token_confidence=None) for s in SAMPLES],
            "has a confidence of the kind token",
        ),
        ("logistic", with_logprobs()[:1], "no problem is (held out|fitted); give more problems"),
    ],
)
def test_what_is_missing_is_said_in_words(method: str, samples: list[Sample], message: str) -> None:
    with pytest.raises(UserError, match=message):
        posthoc_predictors.fit(method, samples)


@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_responses_that_lack_the_inputs_are_counted(
    held_out: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [changed(sample, confidence=None, status="missing") for sample in SAMPLES[::3]]
    stated = [sample for number, sample in enumerate(SAMPLES) if number % 3]
    write_samples([*silent, *stated], tmp_path / "samples.jsonl")
    options = PosthocFit("isotonic", "verbal", held_out)
    fit_on_files([str(tmp_path / "samples.jsonl")], str(tmp_path / "c.npz"), options)

    def inside(samples: list[Sample]) -> int:
        return sum(
            not posthoc_predictors.is_held_out(posthoc_predictors.problem_of(s), held_out, 0)
            for s in samples
        )

    (counts,) = (one.args for one in caplog.records if one.funcName == "_say_left_out")
    assert isinstance(counts, tuple)
    assert counts[:2] == (inside(stated), inside(SAMPLES))
    caplog.clear()
    write_samples(stated, tmp_path / "samples.jsonl")
    fit_on_files([str(tmp_path / "samples.jsonl")], str(tmp_path / "c.npz"), options)
    assert not [one for one in caplog.records if one.funcName == "_say_left_out"]
