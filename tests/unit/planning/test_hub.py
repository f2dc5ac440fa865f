"""Plans of models that are not on this machine: known ones by their hub's name, others from the
hub, or one line.
"""

import json

import huggingface_hub
import pytest

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.cli import main
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning import plan
from tests.helpers.paths import EXAMPLES


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in an empty directory, without a network."""
    monkeypatch.chdir(tmp_path)
    plan._fetched.cache_clear()
    yield
    plan._fetched.cache_clear()


def test_the_readmes_plan_needs_no_file(capsys):
    assert (
        main(
            ["plan", "--config", str(EXAMPLES / "qwen3_8b/math/dcpo.yaml"), "--gpus", "8", "--json"]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert (
        main(
            [
                "plan",
                "--config",
                str(EXAMPLES / "qwen3_8b/math/dcpo.yaml"),
                "--gpus",
                "8",
                "--reshard",
            ]
        )
        == 0
    )


def test_a_directory_is_taken_before_the_name(tmp_path):
    """A model of one's own may have a known name, and a directory that is not complete is not
    another model.
    """
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(UserError, match=r"config\.json is missing"):
        plan.architecture_of("Qwen/Qwen3-8B")
    with pytest.raises(
        UserError, match="does not exist"
    ):  # Qwen/ is a folder here: a path with an error, not a name
        plan.architecture_of("Qwen/Qwen3-14B")


def test_another_name_is_asked_for_at_the_hub_once(tmp_path, monkeypatch):
    asked = []

    def give(name, file, revision):
        asked.append((name, file))
        return str(plan.MODELS / "Qwen" / "Qwen3-0.6B" / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", give)
    found = [plan.architecture_of("mine/Qwen3-tuned") for _ in range(2)]
    assert found == [read_architecture(plan.MODELS / "Qwen" / "Qwen3-0.6B")] * 2
    assert asked == [("mine/Qwen3-tuned", "config.json")]


@pytest.mark.parametrize("error", [OSError("no network\nat all"), ValueError("Repo id must be")])
def test_what_the_hub_does_not_give_is_one_line(monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(UserError) as refused:
        plan.architecture_of("mine/nothing")
    assert "model.path=mine/nothing" in str(refused.value)
    assert "put that file into mine/nothing/" in str(refused.value)
    assert "Qwen/Qwen3-8B" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_more_tokens_than_positions_are_said(caplog):
    """A run looks at its data; a plan knows the options' bound alone."""
    config = str(EXAMPLES / "qwen3_8b/math/dcpo.yaml")
    limit = read_architecture(plan.MODELS / "Qwen" / "Qwen3-8B").max_position_embeddings
    command = ["plan", "--config", config, "--gpus", "8", f"rollout.max_response_length={limit}"]
    assert main(command) != 2
    assert f"rollout.max_response_length={limit}" in caplog.text
    assert f"(max_position_embeddings={limit})" in caplog.text
