"""The golden numbers of every method through the Megatron policy path in fp32, in every layout,
order and micro-batch.

The loss is the sum over tokens of weight x contribution, with global denominators folded in before
the schedule (``forward_step_calc_loss`` divides by num_tokens = 1 and by the number of
micro-batches, DDP by the data-parallel size; all are cancelled). So nothing below may change it:
rows permuted, the group split over two ranks, packed or padded.
"""

import numpy as np
import pytest

from tests.helpers.cases import full_only
from tests.helpers.launch import Run, runs_by_name
from tests.helpers.objective_cases import (
    EXPECTED,
    GOLDEN_OPTIONS,
    LEFT_OUT,
    NEW,
    OLD,
    OTHER_LOSSES,
    golden_judgements,
    objective,
    samples_of,
    token_batch,
)

CASES = {
    "one": (1, {}, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    "permuted_micro1": (1, {}, 1, [5, 2, 7, 0, 3, 6, 1, 4]),
    "packed_micro4": (1, {"sequence_packing": True}, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
    "dp2_micro2": (2, {"use_distributed_optimizer": True}, 2, [7, 6, 5, 4, 3, 2, 1, 0]),
    "tp2_packed": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_packing": True},
        4,
        [0, 1, 2, 3, 4, 5, 6, 7],
    ),
    "cp2_micro4": (2, {"context_parallel_size": 2}, 4, [7, 0, 6, 1, 5, 2, 4, 3]),
    "cp2_packed": (
        2,
        {"context_parallel_size": 2, "sequence_packing": True},
        4,
        [0, 1, 2, 3, 4, 5, 6, 7],
    ),
    "tp2_sequence_parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        4,
        [0, 1, 2, 3, 4, 5, 6, 7],
    ),
    "dp2_packed": (2, {"sequence_packing": True}, 4, [2, 1, 0, 3, 4, 5, 6, 7]),
    "pp2_virtual2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        2,
        [0, 1, 2, 3, 4, 5, 6, 7],
    ),
    "pp2_micro1": (2, {"pipeline_model_parallel_size": 2}, 1, [1, 0, 3, 2, 5, 4, 7, 6]),
}
# with `make test-full`: here the denominators over two ranks, in the grid every pair of layouts
FULL = (
    "permuted_micro1",
    "tp2_packed",
    "pp2_virtual2",
    "packed_micro4",
    "cp2_micro4",
    "cp2_packed",
    "dp2_packed",
    "tp2_sequence_parallel",
    "pp2_micro1",
)
LAYOUTS = full_only(CASES, FULL)
RATIO_ONLY = [name for name in GOLDEN_OPTIONS if not name.startswith("ccgspg")]


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    model = str(tiny_models("qwen3", True))
    wanted = {}
    for name, (processes, parallel, size, order) in CASES.items():
        options = {"model": model, "parallel": parallel, "micro_batch_size": size, "order": order}
        wanted[name] = Run(processes, options, "golden")
    return runs_by_name(wanted, FULL, tmp_path_factory.mktemp)


@pytest.mark.parametrize("case", LAYOUTS)
def test_golden_losses(runs, case):
    for rank in runs(case):
        for name in RATIO_ONLY:
            assert rank["losses"][name] == pytest.approx(EXPECTED[name]["loss"], abs=1e-5), name


@pytest.mark.parametrize("case", LAYOUTS)
def test_other_losses(runs, case):
    """CISPO's value has the log-probs themselves in it, which are this model's: it is compared with
    one process.
    """
    for rank in runs(case):
        for name, (_, expected) in OTHER_LOSSES.items():
            if name.endswith("cispo"):
                expected = runs("one")[0]["losses"][name]
                assert abs(expected) > 1e-2
            assert rank["losses"][name] == pytest.approx(expected, abs=1e-5), name


@pytest.mark.parametrize("case", LAYOUTS)
def test_ccgspg_equals_its_float64_formula(runs, case):
    for rank in runs(case):
        new = [np.array(rank["new"][str(i)]) for i in range(8)]
        old = [lp - (n - o) for lp, n, o in zip(new, NEW, OLD, strict=True)]
        method = objective(**GOLDEN_OPTIONS["ccgspg beta=0.01"])
        losses, _ = method.loss(
            *token_batch(method.score(samples_of(golden_judgements(), old)), old, new)
        )
        assert rank["losses"]["ccgspg beta=0.01"] == pytest.approx(float(losses.sum()), abs=1e-5)


@pytest.mark.parametrize("case", full_only([case for case in CASES if case != "one"], FULL))
def test_gradient_norms_do_not_depend_on_the_layout(runs, case):
    expected = runs("one")[0]["norms"]
    for name, norm in runs(case)[0]["norms"].items():
        assert norm == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.parametrize("case", LAYOUTS)
def test_loss_and_gradient_without_what_cannot_move_a_weight(runs, case):
    """A group of 20 that are all right, of whom the first and the 17th are computed: the weights
    count all of them.
    """
    ranks = [rank["left_out"] for rank in runs(case)]
    for name in LEFT_OUT:
        for rank in ranks:
            everything, some = rank[name]["losses"]
            assert rank[name]["computed"] == [28, 10], "the golden group and two of the other"
            assert some == pytest.approx(everything, abs=1e-6), name
        apart, square = np.sum([rank[name]["apart"] for rank in ranks], axis=0)
        assert square > 1e-8, "there is a gradient"
        assert apart <= 1e-10 * square, name
        for rank in ranks:  # one response is computed: a data-parallel rank has none
            idle = rank[f"{name}, no gradient at all"]
            assert (idle["computed"], idle["losses"], idle["apart"]) == (
                [9, 1],
                [0.0, 0.0],
                [0.0, 0.0],
            )
