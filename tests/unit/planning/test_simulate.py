"""What holds of every simulated step: time and tokens are conserved, no resource is more than busy,
more is not slower.
"""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcpo.cli import main
from megatron_dcpo.config import load_config
from megatron_dcpo.planning import simulate as module
from megatron_dcpo.planning.machine import Machine, Rates
from megatron_dcpo.planning.plan import make_plan
from megatron_dcpo.planning.simulate import (
    PARTS,
    Assumptions,
    Costs,
    Scenario,
    Step,
    costs_of,
    length_stream,
    one_step_off,
    scenarios,
    simulate,
    waits,
)
from tests.helpers.paths import EXAMPLES, QUICKSTART
from tests.helpers.shipped import FAMILIES, MODELS

COSTS = Costs(
    engines=4,
    slots=8,
    read=0.01,
    token=1e-4,
    kv=1e-6,
    prompt=1e-3,
    prompt_tokens=50,
    judge=0.02,
    judges=3,
    train=0.5,
    train_token=1e-4,
    transfer=0.1,
    save=0.05,
)


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
    whole, partial = (steps(COSTS, drawn, count=6), steps(COSTS, drawn, partial=True, count=6))
    assert sum(s.rollout for s in partial) < 0.5 * sum(s.rollout for s in whole)
    share = [Scenario("", COSTS, 32, tuple(found)).shares["slots"] for found in (whole, partial)]
    assert share[1] > 0.95 > share[0]


@pytest.mark.parametrize(
    ("generation", "training", "seconds", "engines_wait", "trainers_wait"),
    [
        ((10, 1), (6, 2), 11.5, 0, 3),  # generation is longer
        ((4, 1), (9, 2), 11.5, 6, 0),  # training is longer
        ((5, 2), (6, 1), 7.5, 0, 0),  # equal
    ],
)
def test_one_step_off_by_hand(generation, training, seconds, engines_wait, trainers_wait):
    """A batch trains while the next one is generated; the transfer waits for both."""
    now = Step(
        rollout=70, judging=7, training=training[0], save=training[1], transfer=0.5, trained=3
    )
    coming = Step(
        generation[0],
        generation[1],
        training=80,
        save=training[1],
        transfer=0.5,
        trained=4,
        engine_busy=6,
    )
    (step,) = one_step_off([now, coming])
    assert step.seconds == seconds
    assert (step.engines_wait, step.trainers_wait, step.trained) == (engines_wait, trainers_wait, 3)
    scenario = Scenario("", replace(COSTS, engines=2), 32, (step,))
    assert scenario.shares["engines"] == 3 / seconds
    assert scenario.shares["trainers"] == training[0] / seconds
    assert waits(scenario) == {
        "engines wait for the longest responses": generation[0] - 3,
        "engines wait for the training": engines_wait,
        "trainers wait for the rollout": trainers_wait,
        "engines wait for the last verdicts": generation[1],
        "all wait for the weight transfer": 0.5,
        "trainers wait for checkpoints": training[1],
    }


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 6), st.floats(0, 1e-2), st.floats(0, 1))
def test_what_is_busy_and_what_waits_is_the_step(drawn, engines, train_token, judge):
    """Engines and trainers, one step off or not; with the same resources it is never slower."""
    costs = replace(COSTS, engines=engines, train_token=train_token, judge=judge)
    after = steps(costs, drawn, count=4)
    beside = one_step_off(after)
    assert [(step.trained, step.rollout) for step in beside] == [
        (now.trained, coming.rollout) for now, coming in itertools.pairwise(after)
    ]
    for one in (Scenario("", costs, 32, tuple(after)), Scenario("", costs, 32, tuple(beside))):
        off = one.steps[0].beside
        wait = {
            what.replace("all wait", who + " wait"): seconds
            for what, seconds in waits(one).items()
            for who in (["engines", "trainers"] if what.startswith("all") else [what.split()[0]])
        }
        idle = {
            who: sum(seconds for what, seconds in wait.items() if what.startswith(who))
            for who in ("engines", "trainers")
        }
        assert all(0 <= share <= 1 + 1e-9 for share in one.shares.values()), one.shares
        total = one.mean("seconds")
        assert idle["engines"] + one.mean("engine_busy") / engines == pytest.approx(total)
        assert idle["trainers"] + one.mean("training") == pytest.approx(total)
        assert off == (one.steps[0] is beside[0])
    together = [
        now.training + now.save + c.rollout + c.judging + c.transfer
        for now, c in itertools.pairwise(after)
    ]
    assert all(
        step.seconds <= all_of_it + 1e-9 for step, all_of_it in zip(beside, together, strict=True)
    )


MODEL = f"model.path={MODELS / FAMILIES['qwen3_8b']}"
THINKING = ("parallel.context_parallel_size=1", "parallel.recompute_granularity=full")


def of_8b(name, *options):
    return load_config(EXAMPLES / "qwen3_8b" / "math" / f"{name}.yaml", [MODEL, *options])


@pytest.mark.parametrize(("reserve", "best"), [(5, "4 + 4"), (1, "2 + 6")])
def test_the_split_is_the_fastest_of_those_that_fit(reserve, best):
    """Two trainers, the fastest, need 83 GB and the reserve."""
    config, machine = (
        of_8b("dcpo_thinking", *THINKING),
        Machine(8, 85, reserve, response_tokens=7666),
    )
    found = {}
    for trainers in (2, 4, 6):
        rollout = replace(
            config.rollout, engine="server", async_steps=1, gpu_memory_utilization=0.9
        )
        split = replace(machine, gpus=trainers, engine_gpus=8 - trainers)
        plan = make_plan(replace(config, rollout=rollout), split, Rates())
        costs = costs_of(plan, Assumptions())
        assert (costs.engines, plan.engine.tensor_model_parallel_size) == (8 - trainers, 1)
        draws = length_stream((), 7666, 32768, Assumptions().seed)
        alone = one_step_off(simulate(costs, draws, 1024, module.STEPS))
        found[f"one step off, {trainers} + {8 - trainers}"] = (
            sum(step.seconds for step in alone) / len(alone),
            plan.fits,
        )
    assert min(found, key=lambda name: found[name][0]) == "one step off, 2 + 6"
    fastest = min((name for name in found if found[name][1]), key=lambda name: found[name][0])
    ran = {one.name: one for one in scenarios(config, machine, Rates(), Assumptions())}
    assert (
        [name for name in ran if name.startswith("one step off")]
        == [fastest]
        == [f"one step off, {best}"]
    )
    assert ran[fastest].mean("seconds") == pytest.approx(found[fastest][0])


def test_engines_without_room_for_a_response_are_no_split():
    path, model = (
        EXAMPLES / "llama3.1_70b" / "math" / "dcpo.yaml",
        MODELS / FAMILIES["llama3.1_70b"],
    )
    more = ["rollout.engine=server", "rollout.endpoint=http://x/v1"]
    candidates = []
    for size in (1, 2, 8):
        engine = f"rollout.tensor_model_parallel_size={size}"
        config = load_config(path, [f"model.path={model}", *more, engine])
        assert make_plan(config, Machine(64)).fits, "of the trainers alone"
        candidates.append((str(size), config, Machine(64, engine_gpus=8)))
    assert [name for name, _ in module._fitting(iter(candidates), Rates())] == ["8"], (
        "141 GB of weights"
    )


def test_several_nodes_are_divided_as_a_whole():
    config = of_8b("dcpo")
    names = [name for name, *_ in module._splits(config, Machine(24), Rates())]
    assert names == ["one step off, 8 + 16", "one step off, 16 + 8"]
    assert len(list(module._splits(config, Machine(24), Rates(gpus_per_node=32)))) == 23
    assert not list(module._splits(config, Machine(1), Rates()))


def test_a_run_that_is_one_step_off_is_compared_with_taking_turns():
    config, machine = of_8b("dcpo_async"), Machine(8, engine_gpus=8)
    first, twice, split, colocated, _ = scenarios(config, machine, Rates(), Assumptions())
    names = [one.name for one in (twice, split, colocated)]
    assert names == [
        "twice the GPUs for the rollout",
        "one step off, 8 + 8",
        "colocated on 16 GPUs",
    ]
    assert first.steps == split.steps, "it is the only division into nodes"
    assert (first.costs.engines, twice.costs.engines, colocated.costs.engines) == (8, 16, 16)
    assert all(step.beside for step in (*first.steps, *twice.steps))
    assert not any(step.beside for step in colocated.steps)
    assert first.costs.transfer == pytest.approx(2 * 8.19e9 / 50e9, rel=0.01), (
        "all weights, between nodes"
    )
    assert colocated.mean("seconds") == pytest.approx(
        sum(colocated.mean(part) for part in PARTS[1:])
    )


def test_lengths_have_their_mean_and_bounds():
    drawn = list(itertools.islice(length_stream((), 300, 4000, seed=1), 20000))
    assert sum(drawn) / len(drawn) == pytest.approx(300, rel=0.03)
    assert list(itertools.islice(length_stream((5, 9), 1, 8, seed=1), 50)).count(8) > 0
    assert max(drawn) <= 4000
    assert min(drawn) >= 1


def test_dcpo_plan_simulates_on_the_command_line(capsys, tmp_path):
    plan = [
        "plan",
        "--config",
        str(QUICKSTART / "dcpo.yaml"),
        f"model.path={QUICKSTART / 'policy'}",
        "--gpus",
        "4",
    ]
    (tmp_path / "lengths").write_text("3 5 9\n20")
    assert main([*plan, "--simulate", "--json", "--lengths", str(tmp_path / "lengths")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["scenario"] for one in found][:3] == [
        "as configured",
        "partial rollouts",
        "twice the GPUs for the rollout",
    ]
    assert found[2]["rollout"] <= found[0]["rollout"]
    assert main([*plan, "--simulate"]) == 0
    shown = capsys.readouterr().out
    assert "Assumed: log-normal lengths" in shown
    assert "As configured: " in shown
    assert "One step off, " in shown
    assert (
        main(
            [*plan, "--simulate", "rollout.engine=server", "rollout.endpoint=http://127.0.0.1:1/v1"]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--gpus" in line
    assert "--engine-gpus" in line


@pytest.mark.parametrize("text", ["", "1 2 x", "0 4"])
def test_bad_lengths_are_one_line(capsys, tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    plan = [
        "plan",
        "--config",
        str(QUICKSTART / "dcpo.yaml"),
        f"model.path={QUICKSTART / 'policy'}",
        "--gpus",
        "4",
    ]
    assert main([*plan, "--simulate", "--lengths", str(tmp_path / "lengths")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--lengths" in line
