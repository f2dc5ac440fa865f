"""docs/options.md is what the options are declared as; every one has a sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megatron_dcpo.config import Config, flat, load_config
from megatron_dcpo.config.reference import SECTIONS, options, sections
from megatron_dcpo.objectives.options import ObjectiveConfig
from tests.helpers.paths import QUICKSTART
from tools import options_page

OPTIONS = {option.name: option for section in sections() for option in options(section)}


def test_the_page_is_that_of_the_declarations() -> None:
    assert options_page.PAGE.read_text() == options_page.page(), "run python tools/options_page.py"


def test_a_stale_page_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    stale = tmp_path / "options.md"
    stale.write_text(options_page.PAGE.read_text().replace("group_size", "group_sizes", 1))
    monkeypatch.setattr(options_page, "PAGE", stale)
    monkeypatch.setattr("sys.argv", ["options_page.py", "--check"])
    assert options_page.main() == 1
    assert "run python tools/options_page.py" in capsys.readouterr().out


def test_every_field_of_every_section_has_a_sentence() -> None:
    for section, kind in SECTIONS.items():
        fields = (
            ObjectiveConfig.model_fields
            if kind is ObjectiveConfig
            else [f.name for f in dataclasses.fields(kind)]
        )
        for name in fields:
            dotted = f"{section}.{name}" if section else name
            assert dotted in OPTIONS or (kind is Config and name in SECTIONS), (
                f"{dotted} has no text below it"
            )
    for name, option in OPTIONS.items():
        assert option.meaning[:1].isupper() or option.meaning.startswith("auto: "), name
        assert option.meaning.endswith((".", ")")), name


def test_whatever_a_run_writes_down_is_an_option() -> None:
    """All sections are there: the names of a complete configuration are in the table."""
    from megatron_dcpo.config import as_dict

    names = {name for name, _ in flat(as_dict(load_config(QUICKSTART / "dcpo.yaml")))}
    passed_on = ("parallel.megatron.", "rollout.vllm.", "objective.options.")
    assert {name for name in names if not name.startswith(passed_on)} <= OPTIONS.keys()
    assert len(names) > 90


@pytest.mark.parametrize(
    ("name", "kind", "default", "methods"),
    [
        ("rollout.group_size", "whole number >= 2", "8", ()),
        ("rollout.top_p", "number > 0 and <= 1", "1", ()),
        ("model.path", "text", "required", ()),
        (
            "model.adapter.targets",
            "list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
            None,
            (),
        ),
        ("training.async_save", "true or false or auto", "auto", ()),
        ("parallel.megatron.overlap_grad_reduce", "true or false", "false", ()),
        (
            "objective.lam",
            "number >= 0 and <= 1",
            "0.5",
            ("dcpo", "coupled", "rlcr", "posthoc", "ternary"),
        ),
        ("objective.beta", "number", "0.01", ("ccgspg",)),
        ("objective.variant", "canonical, original", "canonical", ("rlcr",)),
    ],
)
def test_type_default_and_methods(
    name: str, kind: str, default: str | None, methods: tuple[str, ...]
) -> None:
    option = OPTIONS[name]
    assert (option.kind, option.methods) == (kind, methods)
    assert default in (None, option.default)


def test_the_page_names_an_example_that_sets_an_option() -> None:
    setters = options_page.set_by()
    assert "quickstart/dcpo.yaml" in options_page.where("rollout.group_size", setters)
    assert options_page.where("objective.zzz", setters) == "–"


def test_an_example_of_the_quickstart_is_named_before_others_and_these_before_recipes() -> None:
    setters = {"a": ["page.md#b", "../examples/b.yaml", "../examples/quickstart/z.yaml"]}
    assert options_page.where("a", setters) == "[quickstart/z](../examples/quickstart/z.yaml)"
    del setters["a"][2]
    assert options_page.where("a", setters) == "[b](../examples/b.yaml)"
    del setters["a"][1]
    assert options_page.where("a", setters) == "[page](page.md#b)"


def test_a_recipe_counts_where_a_command_reads_it() -> None:
    page = """
## A heading, `here`

<!-- test: file a.yaml -->
```yaml
data: {limit: 3}
```

<!-- test: file unread.yaml -->
```yaml
data: {shuffle: false}
```

<!-- test: run -->
```bash
dcpo train --config a.yaml judging.marker="A: b" \\
  rollout.top_k=3
dcpo evaluate --model policy --top-k 3 --repeats 2
```

```bash
dcpo train --config a.yaml training.steps=3
```
"""
    found = [name for name, heading in options_page.set_by_recipes(page) if heading[0] == "A"]
    assert set(found) == {
        *("data", "data.limit", "judging.marker", "rollout.top_k", "evaluate.model.path"),
        *("evaluate.evaluation.top_k", "evaluate.evaluation.samples"),
    }
    assert options_page.anchor("A heading, `here`") == "a-heading-here"


def test_a_preset_counts_as_what_it_sets() -> None:
    names = set(options_page.names({"objective": {"preset": "dcpo_proper"}}))
    assert {"objective.preset", "objective.lam", "objective.confidence_baseline"} <= names
    assert "objective.ddof" not in names


def test_short_names_and_own_options_count_as_what_they_stand_for() -> None:
    values = {
        "objective": {"weight": 1, "options": {"w": 2}},
        "data": {"path": [{"path": "a", "weight": 1}]},
    }
    assert set(options_page.names(values)) >= {
        *("objective.weight_reasoning", "objective.weight_confidence", "objective.w"),
        *("data.path", "data.path[].path", "data.path[].weight"),
    }
