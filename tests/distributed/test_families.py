"""Families with layers of another form than Llama's (norms behind attention and MLP, one norm over
all heads, partial and interleaved rotations, sliding windows): log-probs and the gradient of every
tensor against transformers, and every layout against one process.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.conversion.convert import export_checkpoint
from tests.distributed.cases.policy import digest
from tests.distributed.test_parallel_parity import LAYOUTS, agrees
from tests.helpers.checkpoints import load_model
from tests.helpers.launch import torchrun_all
from tests.helpers.parity import cases, differences, results_in

FAMILIES = ("glm", "glm4", "olmo2", "olmo3", "gemma3")
TIED = ("gemma3",)
# the others are in the full suite
QUICK = {
    ("glm4", "tp2_sequence_parallel_packed"),
    ("olmo3", "tp2_sequence_parallel_packed"),
    ("gemma3", "cp2_packed"),
}
CASES = cases(FAMILIES, LAYOUTS, QUICK)


@pytest.fixture(scope="module")
def model(tiny_models):
    return lambda family: str(tiny_models(family, family in TIED))


@pytest.fixture(scope="module")
def against_transformers(model, tmp_path_factory):
    models = {family: model(family) for family in FAMILIES}
    return differences(models, tmp_path_factory.mktemp("gradients"))


@pytest.fixture(scope="module")
def policy_of(model, tmp_path_factory):
    return results_in(model, LAYOUTS, QUICK, {}, tmp_path_factory.mktemp)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_transformers(against_transformers, family):
    """In fp32: log-probs to a few units in the last place, gradients of each tensor to 3e-6 of its
    largest number.
    """
    found = against_transformers[family]
    assert found["logprobs"] <= 4e-6
    for name, difference in found["gradients"].items():
        assert difference <= 3e-6, name


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_layout_equals_one_process(policy_of, family, layout):
    agrees(policy_of(family, layout), policy_of(family, "one process")[0], LAYOUTS[layout][1])


TP2 = {"tensor_model_parallel_size": 2}


# two processes save, one resumes
@pytest.mark.parametrize(("family", "two"), [("olmo3", TP2), ("gemma3", {})])
def test_a_checkpoint_resumes_in_another_layout_and_is_exported(
    family, two, model, tmp_path_factory
):
    """Saved after one of three steps: one process goes on in the same way, and the exported model
    is the one that was saved.
    """
    directory = tmp_path_factory.mktemp("saved")
    checkpoints = directory / "checkpoints"
    options = {"model": model(family)}
    saving = {"save": str(checkpoints), "parallel": two}
    (went_on,) = torchrun_all([("policy", options | saving)], 2, directory / "two")
    loading = options | {"load": str(checkpoints), "parallel": {}}
    jobs = [("policy", loading | {"steps": steps}) for steps in (2, 0)]
    (resumed,), (loaded,) = torchrun_all(jobs, 1, directory / "one")
    np.testing.assert_allclose(resumed["losses"], went_on[0]["losses"][1:], rtol=1e-5)
    np.testing.assert_allclose(resumed["norms"], went_on[0]["norms"][1:], rtol=2e-5)
    export_checkpoint(checkpoints, directory / "exported", hf_config=Path(model(family)))
    exported = load_model(directory / "exported")
    assert exported.keys() == loaded["weights"].keys()
    for name, tensor in exported.items():
        assert digest(tensor) == loaded["weights"][name], name
