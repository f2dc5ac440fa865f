"""What ``tests/gpu`` runs on a GPU, once on the CPU: the same functions, so that only the device is
left to try.
"""

import pytest

from tests.gpu import checks
from tests.helpers.launch import torchrun_all
from tests.helpers.transformer_engine import environment

WHAT = ("save_and_resume", "offload", "logprobs", "restart", "memory")


@pytest.fixture(scope="module")
def results(tiny_models, tmp_path_factory):
    """By name: the results of the one rank, a process for each, as the tests of the GPU
    start them.
    """
    common = {"model": str(tiny_models("qwen3", True)), "layers": "local"}
    sizes = {"prompt_tokens": 5, "response_tokens": 11, "micro_batch_size": 2}
    options = {
        "save_and_resume": {"dtype": "bf16", "distributed": True},
        "offload": {"dtype": "bf16", "distributed": True, "pretend": True},
        "logprobs": {"dtype": "fp32"},
        "restart": {"dtype": "fp32", "engine": "transformers"},
        "memory": {"dtype": "bf16", "distributed": True, **sizes},
    }
    order = [what for what in WHAT if what != "offload"] + [
        "offload"
    ]  # it changes what the device seems to be
    jobs = [("device", common | {"what": what} | options[what]) for what in order]
    ranks = torchrun_all(jobs, 1, tmp_path_factory.mktemp("device"))
    return {what: result for what, (result,) in zip(order, ranks, strict=True)}


def test_save_and_resume(results):
    checks.save_and_resume(results["save_and_resume"])
    assert results["save_and_resume"]["norms"][0] == results["save_and_resume"]["norms"][1], (
        "one thread repeats itself"
    )


def test_offload(results):
    checks.offload(results["offload"], rounding=0)


def test_logprobs(results):
    checks.logprobs(results["logprobs"], "fp32")


@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
def test_logprobs_of_other_families(tiny_models, tmp_path, layers):
    """Transformer Engine's layers are those of the stand-in, which has no experts."""
    families = checks.FAMILIES["others"]
    on_stand_in = None
    if layers == "transformer_engine":
        families = [one for one in families if one[0] != "qwen3_moe"]
        on_stand_in = environment()
    common = {"what": "logprobs", "layers": layers, "dtype": "fp32"}
    jobs = [("device", common | {"model": str(tiny_models(*one))}) for one in families]
    for (result,) in torchrun_all(jobs, 1, tmp_path, environment=on_stand_in):
        checks.logprobs(result, "fp32")


def test_restart(results):
    checks.restart(results["restart"])


def test_memory_of_the_state(results):
    """The CPU counts no activations: resting and saving are the state, which the plan knows
    exactly.
    """
    measured, predicted = results["memory"]["measured"], results["memory"]["predicted"]
    assert measured["resting"] == predicted["resting"] == measured["save"] == predicted["save"]
    assert predicted["update"] > measured["update"]


def test_checks_see_what_is_wrong(results):
    """Each of the checks, on a result in which one thing is not as it should be."""
    wrong = [
        (checks.save_and_resume, {"resumed": "other"}, "save_and_resume", ()),
        (checks.offload, {"held": [results["offload"]["held"][0]] * 4}, "offload", (0,)),
        (checks.logprobs, {"packed, padded": [1.0, 1.0]}, "logprobs", ("fp32",)),
        (checks.restart, {"device_gb": [1.0, 9.0, 9.0, 9.0]}, "restart", ()),
        (checks.restart, {"tokens": [[[1]], [[2]]]}, "restart", ()),
    ]
    for check, change, what, more in wrong:
        with pytest.raises(AssertionError):
            check(results[what] | change, *more)
