"""What holds of every simulated step: time and tokens are conserved, no resource is more than busy, more is not slower."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcpo.cli import main
from megatron_dcpo.planning.simulate import PARTS, Costs, Scenario, length_stream, simulate
from tests.helpers.paths import QUICKSTART

COSTS = Costs(
    engines=4, slots=8, read=0.01, token=1e-4, kv=1e-6, prompt=1e-3, prompt_tokens=50, judge=0.02, judges=3,
    train=0.5, train_token=1e-4, transfer=0.1, save=0.05,
)  # fmt: skip


def steps(costs, lengths, partial=False, count=3, responses=32):
    return simulate(costs, itertools.cycle(lengths), responses, count, partial)


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths, st.booleans(), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4))
def test_shares_and_tokens(drawn, partial, engines, slots, judges):
    costs = replace(COSTS, engines=engines, slots=slots, judges=judges)
    found = steps(costs, drawn, partial)
    shares = Scenario("", costs, 32, tuple(found)).shares
    assert all(0 <= share <= 1 + 1e-9 for share in shares.values()), shares
    carried = 0
    for step in found:
        assert step.generated + carried == step.trained + step.carried
        carried = step.carried
        assert step.seconds == pytest.approx(sum(getattr(step, part) for part in PARTS[1:]))
    if not partial:
        assert carried == 0
        taken = itertools.cycle(drawn)
        assert [s.trained for s in found] == [sum(next(taken) for _ in range(32)) for _ in found]


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(1, 12))
def test_twice_the_engines_are_never_slower(drawn, engines, slots):
    few = steps(replace(COSTS, engines=engines, slots=slots), drawn)
    many = steps(replace(COSTS, engines=2 * engines, slots=slots), drawn)
    assert all(b.rollout <= a.rollout + 1e-9 for a, b in zip(few, many, strict=True))


def test_equal_lengths_by_hand():
    """One engine, all at once: T decoding steps, whose context grows; the last verdicts in turn."""
    costs = replace(COSTS, engines=1, slots=32, judges=1)
    (step,) = steps(costs, [100], count=1)
    context = 50 + 100 / 2
    assert step.rollout == pytest.approx(32 * 1e-3 + 100 * (0.01 + 32 * (1e-4 + 1e-6 * context)))
    assert step.judging == pytest.approx(32 * 0.02)
    assert step.training == pytest.approx(0.5 + 1e-4 * 32 * (100 + 50))
    assert step.slot_steps == step.generated == 3200


def test_partial_rollouts_do_not_wait_for_the_longest():
    drawn = [10] * 31 + [1000]
    whole, partial = steps(COSTS, drawn, count=6), steps(COSTS, drawn, partial=True, count=6)
    assert sum(s.rollout for s in partial) < 0.5 * sum(s.rollout for s in whole)
    share = [Scenario("", COSTS, 32, tuple(found)).shares["slots"] for found in (whole, partial)]
    assert share[1] > 0.95 > share[0]


def test_lengths_have_their_mean_and_bounds():
    drawn = list(itertools.islice(length_stream((), 300, 4000, seed=1), 20000))
    assert sum(drawn) / len(drawn) == pytest.approx(300, rel=0.03)
    assert list(itertools.islice(length_stream((5, 9), 1, 8, seed=1), 50)).count(8) > 0
    assert max(drawn) <= 4000
    assert min(drawn) >= 1


def test_the_command(capsys, tmp_path):
    plan = ["plan", "--config", str(QUICKSTART / "dcpo.yaml"), f"model.path={QUICKSTART / 'policy'}", "--gpus", "4"]
    (tmp_path / "lengths").write_text("3 5 9\n20")
    assert main([*plan, "--simulate", "--json", "--lengths", str(tmp_path / "lengths")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["scenario"] for one in found][:3] == [
        "as configured", "partial rollouts", "twice the GPUs for the rollout"
    ]  # fmt: skip
    assert found[2]["rollout"] <= found[0]["rollout"]
    assert main([*plan, "--simulate"]) == 0
    shown = capsys.readouterr().out
    assert "Assumed: log-normal lengths" in shown
    assert "As configured: " in shown


@pytest.mark.parametrize("text", ["", "1 2 x", "0 4"])
def test_bad_lengths_are_one_line(capsys, tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    plan = ["plan", "--config", str(QUICKSTART / "dcpo.yaml"), f"model.path={QUICKSTART / 'policy'}", "--gpus", "4"]
    assert main([*plan, "--simulate", "--lengths", str(tmp_path / "lengths")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--lengths" in line
