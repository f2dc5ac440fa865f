"""The model card of a run: ``README.md`` of what ``dcpo train`` and ``dcpo sft`` leave. Every
number is from the records of the run: ``config.yaml``, ``run.json`` and ``metrics.jsonl``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from megatron_dcpo.data.row_files import is_here, is_hub_name
from megatron_dcpo.evaluation import run_description
from megatron_dcpo.evaluation.headline import METRICS, format_value
from megatron_dcpo.evaluation.runs import EvaluatedRun, is_supervised, read_run
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.run_records import read_launches

CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md.j2")
_SHOWN = (
    "accuracy",
    "ece",
    "brier",
    "auroc",
    "auroc_within",
    "auroc_within_problem",
    "violation_rate",
    "n",
)
_TOY_BYTES = 10_000_000  # of weights
_LICENSE = ("license", "license_name", "license_link")


def write_card(run_dir: Path, directory: Path) -> None:
    """Write the card of a run that has just ended into the directory of its policy or its
    adapter.
    """
    run = read_run(run_dir)
    launches = read_launches(run_dir)
    is_adapter = (directory / "adapter_config.json").is_file()
    validated = [row for row in run.metrics if _benchmarks_of(row)]
    card = ModelCard.from_template(
        ModelCardData(**metadata_of(run_dir, is_adapter)),
        template_path=str(_TEMPLATE),
        title=_cell(run_dir.resolve().name),
        kind="A low-rank adapter (LoRA)" if is_adapter else "A language model",
        facts=[(name, _cell(value)) for name, value in _facts(run, launches)],
        trained_by=_command(launches[0]) if launches else "",
        columns=["", *(METRICS[key].label for key in _SHOWN)],
        step=validated[-1].get("step") if validated else None,
        results=_results(validated[-1]) if validated else [],
        unknown=_unknown(run_dir, directory),
    )
    write_atomically(directory / CARD, str(card))


def metadata_of(run_dir: Path, is_adapter: bool) -> dict[str, Any]:
    """Return the hub's metadata of a run: the keys that its records say something about."""
    model = _model(run_dir)
    options = run_description.options(run_dir)
    metadata: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if "commit" in model:
        metadata["base_model"] = str(model["path"]).partition("@")[0]
    datasets = [re.split("[:@]", path)[0] for path in _data(options) if _is_on_hub(path)]
    if datasets:
        metadata["datasets"] = datasets
    metadata |= {key: str(model[key]) for key in _LICENSE if model.get(key)}
    metadata["tags"] = ["dcpo", _method(run_dir, options)]
    return metadata


# ------------------------------------------------------------------------------------ the training


def _facts(run: EvaluatedRun, launches: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return what the run was trained from and with, as far as it is recorded."""
    options = run_description.options(run.path)
    model = _model(run.path)
    last = launches[-1] if launches else {}
    base = _basename(str(model.get("path", "")))
    if "commit" in model:
        base = f"{model['path']}, commit {model['commit']}"
    steps = run.metrics[-1].get("step") if run.metrics else None
    facts = {
        "trained from": base,
        "method": _method(run.path, options),
        "preset": str(options.get("objective.preset") or ""),
        "data": ", ".join(_data_of(options, last, is_supervised(run.path))),
        "steps": "" if steps is None else str(steps),
        "seed": str(options.get("seed", "")),
        "version": str(last.get("version") or ""),
        "commit of Megatron-DCPO": _commit(last),
        "device": str(last.get("device") or ""),
    }
    return [(name, value) for name, value in facts.items() if value]


def _model(run_dir: Path) -> Mapping[str, Any]:
    """Return what ``run.json`` says of the model that the run was started from."""
    launches = read_launches(run_dir)
    model = launches[0].get("model") if launches else None
    return model if isinstance(model, Mapping) else {}


def _method(run_dir: Path, options: Mapping[str, Any]) -> str:
    if is_supervised(run_dir):
        return "sft"
    # of a method of one's own: the name of its function
    return str(options.get("objective.name", "")).rpartition(":")[2]


def _data(options: Mapping[str, Any]) -> list[str]:
    """Return the paths of the data, of one source or of several."""
    paths = options.get("data.path", "")
    if not isinstance(paths, list):
        paths = [paths]
    found = [one.get("path", "") if isinstance(one, Mapping) else one for one in paths]
    return [str(path) for path in found if path]


def _data_of(options: Mapping[str, Any], launch: Mapping[str, Any], is_sft: bool) -> list[str]:
    """Return the data by name and, as far as it is recorded, by size."""
    counts = launch.get("data")
    what = "examples" if is_sft else "problems"
    described = []
    for path in _data(options):
        name = path if _is_on_hub(path) else _basename(path)
        if isinstance(counts, Mapping) and path in counts:
            name += f" ({counts[path]:,} {what})"
        described.append(name)
    return described


def _is_on_hub(path: str) -> bool:
    return is_hub_name(path) and not is_here(path)


def _commit(launch: Mapping[str, Any]) -> str:
    commit = str(launch.get("commit") or "")
    return f"{commit}, with changes" if commit and launch.get("uncommitted_changes") else commit


def _command(launch: Mapping[str, Any]) -> str:
    """Return the recorded command, without the directories of the machine that it ran on."""
    words = launch.get("command")
    if not isinstance(words, list) or not words:
        return ""
    shown = [_without_directories(str(word)) for word in words[1:]]
    return shlex.join(["dcpo", *shown]).replace("`", "")


def _without_directories(text: str) -> str:
    """Return a text in which an absolute path is its last part."""
    return re.sub(r"(?<![\w.~:/-])[~]?/(?:[^/\s,=]+/)*", "", text)


def _basename(path: str) -> str:
    return Path(path).name


# ------------------------------------------------------------------------------------- the results


def _results(row: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table of results: a benchmark each of a validation."""
    rows = []
    for name in _benchmarks_of(row):
        values = [format_value(key, row.get(f"evaluation/{name}/{key}")) for key in _SHOWN]
        rows.append([_cell(f"{name}, verbal"), *values])
        for turn in _turns_of(row, name):
            prefix = f"evaluation/{name}/turn_{turn}_"
            values = [format_value(key, row.get(f"{prefix}{key}")) for key in _SHOWN]
            rows.append([_cell(f"{name}, after turn {turn}"), *values])
    return rows


def _turns_of(row: Mapping[str, Any], benchmark: str) -> list[int]:
    """Return the numbers of the turns behind which confidences were stated."""
    keys = (re.fullmatch(r"evaluation/(.+)/turn_(\d+)_n", key) for key in row)
    return sorted(int(key[2]) for key in keys if key is not None and key[1] == benchmark)


def _benchmarks_of(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the benchmarks that a row of ``metrics.jsonl`` has the accuracy of."""
    keys = [key.split("/") for key in row if key.startswith("evaluation/")]
    return [parts[1] for parts in keys if len(parts) == 3 and parts[2] == "accuracy"]


def _unknown(run_dir: Path, directory: Path) -> list[str]:
    model = _model(run_dir)
    lines = ["Its safety was not evaluated."]
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if size < _TOY_BYTES and not (directory / "adapter_config.json").is_file():
        lines.append("It is a toy: too small for anything but the task it was trained on.")
    if not model.get("license"):
        lines.append("The license of the model that it was trained from is not recorded.")
    if "commit" not in model:
        lines.append("It was trained from a directory, whose origin is not recorded.")
    return lines


def _cell(text: str) -> str:
    """Return a text as one line that is no markup of a table."""
    return re.sub(r"[|`<>\s]+", " ", text).strip()
