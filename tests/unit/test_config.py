"""Configurations: every shipped file loads, bases and overrides merge, errors name the nearest
valid key.
"""

import json

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import load_config, to_yaml
from megatron_dcpo.config.renamed import REMOVED
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import METHODS, resolve
from tests.helpers.paths import EXAMPLES

SHIPPED = sorted(EXAMPLES.glob("**/*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(EXAMPLES)))
def test_every_shipped_config_dry_runs(path, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    assert main(["train", "--config", str(path), "--dry-run", "--allow-missing", "--json"]) == 0
    assert '"objective"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "setting", ["qwen3_8b/math", "qwen3_8b/code", "qwen3_14b/math", "llama3.1_8b/math"]
)
def test_every_method_has_a_config_in_every_setting_of_the_paper(setting):
    """All but ``ternary``, which the paper does not know: its example is the quickstart's."""
    names = {load_config(path).objective.name for path in (EXAMPLES / setting).glob("*.yaml")}
    assert names == set(METHODS) - {"ternary"}
    assert load_config(EXAMPLES / "quickstart" / "ternary.yaml").objective.name == "ternary"


def test_paper_hyper_parameters():
    """The paper's settings: 256 prompts x 8, four updates of 64 prompts, lr 1e-6, 1024 + 3000
    tokens, clip 0.2 / 0.28.
    """
    config = load_config(EXAMPLES / "qwen3_8b" / "math" / "dcpo.yaml")
    options = resolve(config.objective)
    assert (
        config.data.prompts_per_step,
        config.rollout.group_size,
        config.training.updates_per_rollout,
    ) == (256, 8, 4)
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (1024, 3000)
    assert (config.optimizer.lr, config.optimizer.clip_grad, config.training.steps) == (
        1e-6,
        1.0,
        120,
    )
    assert (options.lam, options.calibration_loss, options.loss_aggregation) == (
        0.5,
        "l1",
        "sequence_mean",
    )
    assert (options.clip_low, options.clip_high, options.dual_clip) == (0.2, 0.28, 0.0)


def test_written_config_reads_back(tmp_path):
    config = load_config(
        EXAMPLES / "quickstart" / "dcpo_proper.yaml", ["objective.lam=0.25", "seed=5"]
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "config.yaml")
    assert to_yaml(again) == to_yaml(config)
    assert resolve(again.objective) == resolve(config.objective)
    assert "null" not in to_yaml(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run_dir: [", "c.yaml"),
        ("- a\n- b", "mapping"),
        ("run_dir: r\nmodel: {path: m}", "data is required"),
        ("run_dir: r\nmodel: {path: m}\ndata: {path: d}\nobjective: {lam: 2}", "objective.lam"),
        (
            "run_dir: r\nmodel: {path: m}\ndata: {path: d}\nrollout: {group_size: 1}",
            "rollout.group_size",
        ),
        (
            "run_dir: r\nmodel: {path: m}\ndata: {path: d}\ntraning: {steps: 1}",
            "did you mean training?",
        ),
        (
            "run_dir: r\nmodel: {path: m}\ndata: {path: d, prompts_per_step: 5}\ntraining: "
            "{updates_per_rollout: 2}",
            "divide",
        ),
        (
            "run_dir: r\nmodel: {path: m}\ndata: {path: d}\nrollout: {chunks: 4}",
            "rollout.chunks was removed, take it out: each response is judged as soon as it is "
            "there; "
            "rollout.max_num_seqs bounds",
        ),
        ("base: c.yaml", "its own base"),
        ("base: other.yaml", "other.yaml does not exist"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


BASE = "run_dir: r\nmodel: {path: m}\ndata: {path: d}\n"


def test_every_moved_option_works_by_its_old_name(tmp_path, caplog):
    """With a warning that names the new one; what the file says under the new name wins."""
    old = {
        "parallel": {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "cp_comm_type": "p2p",
        },
        "optimizer": {"adam_beta1": 0.8},
        "rollout": {
            "max_model_len": 0,
            "enforce_eager": True,
            "dtype": "same",
            "vllm": {"enforce_eager": False},
        },
        "training": {"early_stop": {"patience": 3}, "keep_best": "accuracy"},
        "evaluation": {"interval": 1, "benchmarks": "math500"},
    }
    (tmp_path / "c.yaml").write_text(
        BASE + "".join(f"{name}: {json.dumps(part)}\n" for name, part in old.items())
    )
    config = load_config(tmp_path / "c.yaml")
    expected = {"virtual_pipeline_model_parallel_size": 2, "cp_comm_type": "p2p", "adam_beta1": 0.8}
    assert config.parallel.megatron == expected
    assert config.parallel.virtual_pipeline_model_parallel_size == 2
    assert config.rollout.vllm == {"enforce_eager": False}, "0 and same stood for a default"
    assert config.training.early_stop == 3
    assert (
        "optimizer.adam_beta1 is now parallel.megatron.adam_beta1; the old name works in this "
        "release" in caplog.text
    )
    assert caplog.text.count("is now") == 7


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_every_removed_option_is_refused_with_its_reason(tmp_path, name):
    (tmp_path / "c.yaml").write_text(BASE)
    with pytest.raises(UserError) as error:
        load_config(
            tmp_path / "c.yaml",
            [f"{name}=1", "model.adapter.rank=4"] if "adapter" in name else [f"{name}=1"],
        )
    assert f"{name} was removed, take it out: {REMOVED[name]}" in str(error.value)


def test_a_renamed_option_beside_what_is_no_section(tmp_path):
    (tmp_path / "c.yaml").write_text(BASE + "parallel: {cp_comm_type: p2p, megatron: x}\n")
    with pytest.raises(UserError, match=r"parallel\.megatron"):
        load_config(tmp_path / "c.yaml")


def test_a_metric_of_an_early_stop_is_not_dropped_in_silence(tmp_path):
    (tmp_path / "c.yaml").write_text(
        BASE + "training: {early_stop: {metric: accuracy, patience: 2}, keep_best: ece}\n"
    )
    with pytest.raises(UserError, match=r"training\.early_stop\.metric was removed"):
        load_config(tmp_path / "c.yaml")
