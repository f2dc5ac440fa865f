"""What a run leaves of its adapters is served by vLLM: that of the policy, and a confidence's with tokens of its own."""

import numpy as np
import torch
from megatron_dcpo.judging.statement import StatementForm
from megatron_dcpo.rollout.confidence_adapter import ConfidenceAdapter
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dcpo.rollout import TransformersEngine
from megatron_dcpo.weights.peft_adapter import DIRECTORY, read_adapter
from tests.helpers.launch import torchrun
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import policy_with_room, train
from tests.helpers.vllm import needs_vllm

pytestmark = needs_vllm


def test_vllm_serves_the_adapter(tmp_path):
    options = ("training.train=adapter", "model.adapter.rank=4", "optimizer.adapter_lr=0.02", "training.steps=3")
    train(tmp_path / "run", *options, "rollout.engine=transformers")
    sequences, token_ids = [list(range(5, 5 + n)) for n in (3, 17, 40)], list(range(30, 50))
    settings = {
        "model": str(QUICKSTART / "policy"),
        "adapter": str(tmp_path / "run" / "adapter"),
        "sequences": sequences,
        "token_ids": token_ids,
    }
    served = torchrun("vllm_adapter", 1, tmp_path / "out", settings)[0]
    expected = {}
    for name, directory in (("merged", tmp_path / "run" / "policy"), ("base", QUICKSTART / "policy")):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            rows = [model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token_ids] for ids in sequences]
        expected[name] = torch.stack(rows).numpy()
    np.testing.assert_allclose(served, expected["merged"], atol=2e-3)
    assert np.abs(np.array(served) - expected["base"]).max() > 0.02


def test_vllm_states_by_the_tokens_of_an_adapter(tmp_path):
    """The same as a transformers model does, whose output rows they are."""
    model = policy_with_room(tmp_path / "model")
    options = (f"model.path={model}", "judging.confidence_tokens=101", "optimizer.adapter_lr=0.05", "training.steps=6")
    options += ("model.adapter.activated=false", "objective.confidence_sees=text", "rollout.engine=transformers")
    train(tmp_path / "run", *options, method="dcpo_adapter")
    policy = tmp_path / "run" / "policy"
    saved = read_adapter(policy / DIRECTORY)
    lead = AutoTokenizer.from_pretrained(policy).encode("\n<conf> Confidence:", add_special_tokens=False)
    texts = [list(range(5, 5 + n)) for n in (3, 17, 40)]
    settings = {
        "model": str(policy),
        "adapter": str(saved.directory),
        "rank": saved.rank,
        "sequences": [[*ids, *lead] for ids in texts],
        "token_ids": list(saved.token_ids),
    }
    served = torchrun("vllm_adapter", 1, tmp_path / "out", settings)[0]
    form = StatementForm("", tuple(lead), np.arange(101), activated=False)
    here = ConfidenceAdapter(TransformersEngine.from_pretrained(policy), saved, form)
    expected = here.logits(texts, np.zeros((3, 4), np.float32))[:, 0].log_softmax(-1)
    np.testing.assert_allclose(torch.tensor(served).log_softmax(-1), expected, atol=2e-3)
    assert expected.std() > 0.01
