"""The configurations in examples/, and the models that they name."""

from __future__ import annotations

from pathlib import Path

from megatron_dcpo.config import load_config
from tests.helpers.paths import EXAMPLES, REPOSITORY

MODELS = REPOSITORY / "megatron_dcpo" / "planning" / "models"  # the public config.json files
FAMILIES = {
    "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_14b": "Qwen/Qwen3-14B",
    "qwen3_32b": "Qwen/Qwen3-32B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "llama3.1_8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1_70b": "meta-llama/Llama-3.1-70B-Instruct",
}
ALL = sorted(path for path in EXAMPLES.rglob("*.yaml") if "elsewhere" not in path.parts)
TRAINED = [path for path in ALL if path.name != "sft.yaml"]
# without the one that goes on from an adapter, which its base has to train first
SHIPPED = [path for path in TRAINED if path.name not in ("recipe.yaml", "adapter_more.yaml")]


def model_of(path: Path) -> Path:
    """Return the directory of a shipped configuration's model, of which only ``config.json`` may be
    there.
    """
    family = path.relative_to(EXAMPLES).parts[0]
    if family in FAMILIES:
        return MODELS / FAMILIES[family]
    model = load_config(path).model.path
    if model.startswith("runs/"):  # trained from this one
        return EXAMPLES / "quickstart" / "policy"
    if (MODELS / model).is_dir():  # a name of the hub
        return MODELS / model
    return REPOSITORY / model
