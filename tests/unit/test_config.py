"""Configurations: every shipped file loads, bases and overrides merge, errors name the nearest
valid key.
"""

import pytest
from pydantic import ValidationError

from megatron_dcpo.cli import main
from megatron_dcpo.config import ParallelConfig, load_config, overridden, to_yaml
from megatron_dcpo.config.evaluation import load_evaluation
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import METHODS, resolve
from tests.helpers.paths import EXAMPLES
from tests.helpers.shipped import TRAINED


@pytest.mark.parametrize("path", TRAINED, ids=lambda p: str(p.relative_to(EXAMPLES)))
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
        ("data: [1\nmodel: }", "c.yaml"),
        ("- a\n- b", "c.yaml"),
        ("run_dir: r\nmodel: {path: m}", "data"),
        ("run_dir: r\nmodel: {path: m}\ndata: {path: d}\nobjective: {lam: 2}", "objective.lam"),
        (
            "run_dir: r\nmodel: {path: m}\ndata: {path: d}\nrollout: {group_size: 1}",
            "rollout.group_size",
        ),
        (
            "run_dir: r\nmodel: {path: m}\ndata: {path: d}\ntraning: {steps: 1}",
            "training",
        ),
        (
            "run_dir: r\nmodel: {path: m}\ndata: {path: d, prompts_per_step: 5}\ntraining: "
            "{updates_per_rollout: 2}",
            "updates_per_rollout",
        ),
        ("base: c.yaml", "base"),
        ("base: other.yaml", "other.yaml"),
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


def test_options_of_megatron_are_checked_and_what_was_given_is_not_changed():
    given = {"recompute_modules": ["mlp"], "bias_swiglu_fusion": True, "cp_comm_type": "p2p"}
    config = ParallelConfig(megatron=given)
    assert given["recompute_modules"] == ["mlp"]
    assert config.recompute_modules == config.megatron["recompute_modules"] == ("mlp",)
    assert config.megatron["bias_swiglu_fusion"] is True
    assert config.virtual_pipeline_model_parallel_size == 1
    with pytest.raises(ValidationError, match="cp_comm_type"):
        ParallelConfig(megatron={"cp_comm_type": "ring"})


def test_an_option_of_megatron_in_another_section_is_pointed_to_its_own(tmp_path):
    (tmp_path / "c.yaml").write_text(BASE)
    with pytest.raises(UserError, match=r"parallel\.megatron\.cp_comm_type"):
        load_config(tmp_path / "c.yaml", ["parallel.cp_comm_type=p2p"])
    with pytest.raises(UserError, match=r"parallel\.megatron.*cp_comm_type"):
        load_config(tmp_path / "c.yaml", ["parallel.megatron.cp_comm_type=ring"])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.path.0.weight=5", (5.0, 2.0)),
        ("data.path[1].weight=5", (1.0, 5.0)),
        ("data.path.1={path: c, weight: 3}", (1.0, 3.0)),
        ("data.path=[{path: c, weight: 4}]", (4.0,)),
    ],
)
def test_an_override_names_a_place_in_a_list(tmp_path, override, value):
    sources = "[{path: a}, {path: b, weight: 2}]"
    (tmp_path / "c.yaml").write_text(BASE.replace("path: d", f"path: {sources}"))
    sources = load_config(tmp_path / "c.yaml", [override]).data.sources
    assert tuple(source.weight for source in sources) == value


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.path.2.weight=5", "data.path.0 to data.path.1"),
        ("data.path.-1.weight=5", "data.path.0 to data.path.1"),
        ("data.path.b.weight=5", "data.path.0 to data.path.1"),
        ("data.path.0.weight=0", "data.path.0.weight=0"),
        ("data.path[0].weight=0", "data.path[0].weight=0"),
        ("data.path.0.wieght=5", "data.path.0.wieght=5"),
        ("data.path.1.weight=5", "data.path.1="),
        ("model.path.0=x", "model.path=..."),
        ("model.path.name=x", "model.path=..."),
        ("=x", "section.key=value"),
    ],
)
def test_a_place_that_a_list_does_not_have_is_named(tmp_path, override, named):
    (tmp_path / "c.yaml").write_text(BASE.replace("path: d", "path: [{path: a}, b]"))
    with pytest.raises(UserError) as error:
        load_config(tmp_path / "c.yaml", [override])
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_an_evaluation_s_override_names_a_place_in_a_list_too():
    given = {"run_dir": "e", "data.sources": [{"path": "a"}, {"path": "b"}]}
    changed = {"data.sources.1.template": "raw"}
    config = load_evaluation({**given, **changed})
    assert [source.template for source in config.data.sources] == [None, "raw"]
    with pytest.raises(UserError, match=r"data\.sources\.0 to data\.sources\.1"):
        load_evaluation({**given, "data.sources.2.template": "raw"})


def test_overrides_keep_interpolations_and_merge_mappings(tmp_path):
    (tmp_path / "c.yaml").write_text(BASE + "rollout: {vllm: {a: 1, b: 2}}\n")
    overrides = ["run_dir=x", "model.path=${run_dir}/m", "rollout.vllm={b: 3}"]
    config = load_config(tmp_path / "c.yaml", [*overrides, "model.adapter.rank=4"])
    assert config.model.path == "x/m"
    assert config.rollout.vllm == {"a": 1, "b": 3}
    assert config.model.adapter.rank == 4


def test_an_empty_mapping_clears_that_of_the_file() -> None:
    values = {"data": {"columns": {"problem": "ask"}, "path": "d.jsonl"}}
    assert overridden(values, "data.columns", {}) == {"data": {"columns": {}, "path": "d.jsonl"}}
    assert overridden(values, "data.columns", {"answer": "gold"})["data"]["columns"] == {
        "problem": "ask",
        "answer": "gold",
    }
