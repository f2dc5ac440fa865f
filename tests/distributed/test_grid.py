"""The invariance grid: loss and gradient norm do not depend on how the work is laid out (relative
1e-5 in fp32).

TP x PP x VPP x SP x CP x DP x distributed optimizer x packing x micro-batch x recomputation x
overlap. ``DCPO_GRID=full`` (``make test-grid``) runs every legal combination; by default a subset
in which every pair of values that can stand together does so at least once.
"""

import itertools
import os

import numpy as np
import pytest

from tests.helpers.launch import Run, runs_by_name, torchrun

AXES = {
    "tp": (1, 2),
    "pp": (1, 2),
    "vpp": (1, 2),
    "sp": (False, True),
    "dp": (1, 2),
    "cp": (1, 2),
    "do": (False, True),
    "packing": (False, True),
    "micro_batch": (1, 2, 4),
    "recompute": ("none", "selective", "full"),
    "overlap": (False, True),
}
LAYOUT = ("tp", "pp", "vpp", "sp", "dp", "cp")


def legal(point):
    return (point["vpp"] == 1 or point["pp"] == 2) and (not point["sp"] or point["tp"] == 2)


def every_point():
    return [
        p
        for values in itertools.product(*AXES.values())
        if legal(p := dict(zip(AXES, values, strict=True)))
    ]


def processes_of(point):
    return point["tp"] * point["pp"] * point["dp"] * point["cp"]


def pairs_of(point):
    return set(itertools.combinations(point.items(), 2))


def covering(points):
    """Greedy: the layout on at most four processes that adds most, so that few process groups are
    started.
    """
    points = [p for p in points if processes_of(p) <= 4]
    missing = set().union(*map(pairs_of, points))
    chosen = []
    while missing:
        started = {tuple(p[axis] for axis in LAYOUT) for p in chosen}
        best = max(
            points,
            key=lambda p: (
                len(pairs_of(p) & missing) + 3 * (tuple(p[axis] for axis in LAYOUT) in started)
                if pairs_of(p) & missing
                else -1
            ),
        )
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def by_layout(points):
    grouped = {}
    for point in points:
        grouped.setdefault(tuple(point[axis] for axis in LAYOUT), []).append(point)
    return grouped


FULL = os.environ.get("DCPO_GRID") == "full"
POINTS = by_layout(every_point() if FULL else covering(every_point()))


def setting(point):
    parallel = {
        "tensor_model_parallel_size": point["tp"],
        "pipeline_model_parallel_size": point["pp"],
        "virtual_pipeline_model_parallel_size": point["vpp"],
        "sequence_parallel": point["sp"],
        "context_parallel_size": point["cp"],
        "use_distributed_optimizer": point["do"],
        "sequence_packing": point["packing"],
        "recompute_granularity": point["recompute"],
        "overlap_grad_reduce": point["overlap"],
        "overlap_param_gather": point["overlap"] and point["do"],
    }
    return {"parallel": parallel, "micro_batch_size": point["micro_batch"]}


@pytest.fixture(scope="module")
def expected(tiny_models, tmp_path_factory):
    """One process, nothing parallel, nothing packed, nothing recomputed."""
    plain = {axis: values[0] for axis, values in AXES.items()}
    options = {"model": str(tiny_models("qwen3", True)), "settings": [setting(plain)]}
    return torchrun("grid", 1, tmp_path_factory.mktemp("plain"), options)[0][0]["measured"]


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    """By layout, the results of every rank for all of its points."""
    model = str(tiny_models("qwen3", True))
    wanted = {}
    for layout, points in POINTS.items():
        options = {"model": model, "settings": [setting(point) for point in points]}
        wanted[layout] = Run(ranks_of(layout), options, "grid")
    return runs_by_name(wanted, (), tmp_path_factory.mktemp, timeout=3000)


def ranks_of(layout):
    return processes_of(dict(zip(LAYOUT, layout, strict=True)))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "layout", POINTS, ids=lambda layout: "tp{}_pp{}_vpp{}_sp{:d}_dp{}_cp{}".format(*layout)
)
def test_same_loss_and_gradient_norm(runs, expected, layout):
    points, processes, worst = POINTS[layout], ranks_of(layout), 0.0
    for rank in runs(layout):
        for point, result in zip(points, rank, strict=True):
            np.testing.assert_allclose(result["measured"], expected, rtol=1e-5, err_msg=str(point))
            assert result["keys_per_query"] == [point["cp"]], (
                "a context-parallel rank has its part of the queries"
            )
            worst = max(worst, float(np.max(np.abs(np.divide(result["measured"], expected) - 1))))
    print(f"{len(points)} settings on {processes} processes, worst relative deviation {worst:.1e}")


def test_the_subset_covers_every_pair():
    full, subset = every_point(), covering(every_point())
    assert len(full) == 9 * 2 * 2 * 2 * 2 * 3 * 3 * 2
    small = [p for p in full if processes_of(p) <= 4]
    wanted = set().union(*map(pairs_of, small))
    assert set().union(*map(pairs_of, subset)) == wanted == set().union(*map(pairs_of, full))


def test_bf16_with_fp32_main_parameters_and_overlap(tiny_models, tmp_path):
    """bf16 with the distributed optimizer: overlapped transfers change nothing at all, packing and
    recomputation only what bf16 rounds.
    """
    plain = {axis: values[0] for axis, values in AXES.items()} | {
        "dp": 2,
        "do": True,
        "micro_batch": 2,
    }
    variants = [
        {},
        {"overlap": True},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"packing": True},
    ]
    settings = [setting(plain | variant) | {"dtype": "bf16"} for variant in variants]
    ranks = torchrun(
        "grid", 2, tmp_path, {"model": str(tiny_models("qwen3", True)), "settings": settings}
    )
    base, overlapped, full, selective, packed = (result["measured"] for result in ranks[0])
    calls = [result["attention_calls"] for result in ranks[0]]
    assert calls[2] == calls[3] == 2 * calls[0] == 2 * calls[1], (
        "recomputation really computes again"
    )
    assert overlapped == base
    np.testing.assert_allclose([full, selective, packed], [base] * 3, rtol=2e-2)
    assert base[2] < base[0]
