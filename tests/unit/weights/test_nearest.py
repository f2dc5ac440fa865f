"""An architecture that is not known: the error names the nearest known one and what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import (
    ARCHITECTURES,
    known_families,
    parse_architecture,
    read_architecture,
)
from megatron_dcpo.weights.nearest import LONGEST, nearest_architecture
from tests.helpers.checkpoints import FAMILIES, SMALL, save_model

SPECIAL = {"bos_token_id": 1, "pad_token_id": 0}


def saved(path: Path, family: str) -> tuple[Path, dict[str, Any]]:
    """A tiny model of transformers', and its configuration."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SMALL, **SPECIAL)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(path)
    return path, json.loads((path / "config.json").read_text())


def line_of(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        read_architecture(path)
    line = str(raised.value)
    assert "\n" not in line
    assert len(line) - len(str(path)) <= LONGEST
    return line


def test_gemma2_differs_in_keys_and_norms(tmp_path: Path) -> None:
    path, config = saved(tmp_path / "model", "Gemma2")
    found = nearest_architecture(config, "Gemma2ForCausalLM", path, known_families())
    assert found.known == "Gemma3ForCausalLM"
    assert found.keys == ("attn_logit_softcapping", "final_logit_softcapping")
    assert found.lacking == ("self_attn.k_norm.weight", "self_attn.q_norm.weight")
    line = line_of(path)
    known = [name.removesuffix("ForCausalLM") for name in ARCHITECTURES]
    for named in ("Gemma2ForCausalLM", *known, found.keys[0], "k_norm"):
        assert named in line


def test_arcee_differs_in_a_projection_that_only_the_weights_show(tmp_path: Path) -> None:
    path, config = saved(tmp_path / "model", "Arcee")
    found = nearest_architecture(config, "ArceeForCausalLM", path, known_families())
    assert (found.known, found.keys) == ("LlamaForCausalLM", ())
    assert found.tensors == ()
    assert found.lacking == ("mlp.gate_proj.weight",)
    assert "gate_proj" in line_of(path)
    with pytest.raises(UserError, match="no weights"):
        parse_architecture(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_model_under_another_name_is_nearest_to_itself(tmp_path: Path, family: str) -> None:
    """Nothing differs, so that an alias of a known architecture shows."""
    path = save_model(tmp_path / "model", family)
    config = json.loads((path / "config.json").read_text())
    name = config["architectures"][0]
    found = nearest_architecture(config, f"My{name}", path, known_families())
    assert (found.known, found.size) == (name, 0)
    config["architectures"] = [f"My{name}"]
    (path / "config.json").write_text(json.dumps(config))
    assert name in line_of(path).split("nearest")[1]


def test_damaged_weights_do_not_hide_the_name(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "model", "Arcee")
    (path / "model.safetensors").write_bytes(b"no tensors")
    assert "ArceeForCausalLM" in line_of(path)


def test_names_of_any_length_stay_in_the_line(tmp_path: Path) -> None:
    names = [f"key_{index}_{'x' * index}\n" for index in range(300)]
    config: dict[str, Any] = {"architectures": ["A\nB" * 200], **dict.fromkeys(names, 1)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "more" in line_of(tmp_path)
