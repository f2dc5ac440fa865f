"""Import and export move every byte to the right place and back, in any family, type and split, in
little memory.
"""

from __future__ import annotations

import enum
import filecmp
import hashlib
import io
import itertools
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_dcpo.architectures.config_json import parse_architecture, read_architecture
from megatron_dcpo.cli import main as dcpo
from megatron_dcpo.conversion.checkpoint_metadata import _MetadataUnpickler
from megatron_dcpo.conversion.convert import export_checkpoint, import_checkpoint
from megatron_dcpo.conversion.megatron_checkpoint import MegatronCheckpoint
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.hf_checkpoint import write_checkpoint
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import padded_vocab_size
from tests.helpers.cases import full_only
from tests.helpers.checkpoints import FAMILIES, expected_megatron, load_model, save_model
from tools.inspect_checkpoint import inspect_checkpoint


def is_quick(family: str, tied: bool, dtype: str, max_shard_size: str = "30KB") -> bool:
    """Every case of a dense family and of one with experts; one case each of the others."""
    if family in ("qwen3", "qwen3_moe"):
        return True
    usual = (family == "gemma3", "bfloat16", "30KB")
    return (tied, dtype, max_shard_size) == usual


def cases(*more: tuple[str, ...]) -> list[Any]:
    """The families, tied and not, in two types, and what ``more`` has; those that are not quick are
    in the full suite.
    """
    axes = (FAMILIES, (True, False), ("float32", "bfloat16"), *more)
    return [
        pytest.param(
            *case,
            id="-".join({True: "tied", False: "untied"}.get(value, value) for value in case),
            marks=[] if is_quick(*case) else [pytest.mark.full],
        )
        for case in itertools.product(*axes)
    ]


@pytest.mark.parametrize(("family", "tied", "dtype", "max_shard_size"), cases(("1GB", "30KB")))
def test_round_trip_gives_the_same_files(tmp_path, family, tied, dtype, max_shard_size):
    """HF -> Megatron -> HF: every file is the same to the byte, weights, index, config and
    tokenizer.
    """
    source = save_model(tmp_path / "hf", family, tied, dtype, max_shard_size)
    imported = import_checkpoint(source, tmp_path / "megatron", verify=True)
    exported = export_checkpoint(tmp_path / "megatron", tmp_path / "back", verify=True)
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == sorted(
        [*names, "conversion.json"]
    )
    _, different, errors = filecmp.cmpfiles(source, tmp_path / "back", names, shallow=False)
    assert (different, errors) == ([], [])
    assert imported.tensors == exported.tensors
    assert len(list(source.glob("*.safetensors"))) == (
        1 if max_shard_size == "1GB" else len(names) - 4
    )


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("llama", {"mlp_bias": True}),
        ("qwen3_moe", {"attention_bias": True, "hidden_act": "relu"}),
        ("mistral", {"sliding_window": None, "head_dim": 16}),
    ],
)
def test_biases_come_back_to_the_byte(tmp_path, family, options):
    source = save_model(tmp_path / "hf", family, **options)
    import_checkpoint(source, tmp_path / "megatron", verify=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", verify=True)
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(source / name, tmp_path / "back" / name, shallow=False)
    expected = expected_megatron(source, padded=384)
    assert any(name.endswith("linear_proj.bias") for name in expected) == bool(
        options.get("attention_bias")
    )
    found = {name: torch.full_like(tensor, 7.0) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "megatron", no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def fused(source, out):
    """The checkpoint with the experts of a layer in one tensor, as in transformers' memory: [E, 2I,
    H], [E, H, I].
    """
    shutil.copytree(source, out)
    tensors = load_model(source)
    for layer in range(4):
        module = f"model.layers.{layer}.mlp.experts."
        parts = {
            p: torch.stack([tensors.pop(f"{module}{e}.{p}_proj.weight") for e in range(4)])
            for p in ("gate", "up", "down")
        }
        tensors[f"{module}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        tensors[f"{module}down_proj"] = parts["down"]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_experts_in_one_tensor_are_imported_to_the_same_bytes(tmp_path):
    source = save_model(tmp_path / "hf", "qwen3_moe", dtype="bfloat16")
    import_checkpoint(source, tmp_path / "apart")
    import_checkpoint(fused(source, tmp_path / "fused"), tmp_path / "together", verify=True)
    assert filecmp.cmp(
        tmp_path / "apart" / "__0_0.distcp", tmp_path / "together" / "__0_0.distcp", shallow=False
    )
    export_checkpoint(tmp_path / "together", tmp_path / "back", verify=True)
    assert filecmp.cmp(
        source / "model.safetensors", tmp_path / "back" / "model.safetensors", shallow=False
    )


@pytest.mark.parametrize("form", ["apart", "together"])
def test_a_missing_expert_is_named(tmp_path, form):
    source = save_model(tmp_path / "hf", "qwen3_moe")
    source = fused(source, tmp_path / "fused") if form == "together" else source
    tensors = load_model(source)
    if form == "together":
        tensors["model.layers.1.mlp.experts.down_proj"] = tensors[
            "model.layers.1.mlp.experts.down_proj"
        ][:3].clone()
    else:
        del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"tensor model.layers.1.mlp.experts.3.down_proj.weight is missing"
    ):
        import_checkpoint(source, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize(("family", "tied", "dtype"), cases())
def test_megatron_tensors_by_torchs_own_reader(tmp_path, family, tied, dtype):
    """The checkpoint, read by torch.distributed.checkpoint, holds what explicit formulas give."""
    source = save_model(tmp_path / "hf", family, tied, dtype)
    import_checkpoint(source, tmp_path / "megatron")
    expected = expected_megatron(source, padded=384)
    found = {name: torch.full_like(tensor, 7.0) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "megatron", no_dist=True)
    assert set(MegatronCheckpoint(tmp_path / "megatron").tensors) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("by_name", [True, False], ids=["python3.11.0-3", "later"])
def test_metadata_of_any_python_is_read(tmp_path, by_name):
    """Python 3.11.0 to 3.11.3, Debian 12's among them, pickle a member of an enumeration as
    getattr(class, name).
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if not isinstance(value, enum.Enum):
                return NotImplemented
            return (
                (getattr, (type(value), value.name)) if by_name else (type(value), (value.value,))
            )

    import_checkpoint(save_model(tmp_path / "hf", "qwen3"), tmp_path / "megatron")
    path = tmp_path / "megatron" / ".metadata"
    expected, metadata = (
        set(MegatronCheckpoint(tmp_path / "megatron").tensors),
        pickle.loads(path.read_bytes()),
    )
    with path.open("wb") as file:
        Pickler(file).dump(metadata)
    assert (b"getattr" in path.read_bytes()) == by_name
    assert set(MegatronCheckpoint(tmp_path / "megatron").tensors) == expected


def test_metadata_reaches_no_attribute_but_the_memory_format(tmp_path):
    """The getattr of the older Pythons is no way to a function that the reader would not find by
    itself.
    """

    class Attribute:
        def __reduce__(self):
            return getattr, (TensorStorageMetadata, "__init__")

    file = io.BytesIO(pickle.dumps(Attribute()))
    assert _MetadataUnpickler(file).load() is not TensorStorageMetadata.__init__


@pytest.mark.parametrize(
    ("vocab", "divisor", "tp", "padded"),
    [
        (500, 128, 4, 512),
        (500, 128, 1, 512),
        (500, 1, 4, 500),
        (501, 1, 4, 504),
        (151643, 128, 1, 151680),
        (151643, 128, 4, 152064),
        (151936, 128, 1, 151936),
        (151936, 128, 2, 152064),
        (128256, 128, 4, 128512),
        (128256, 128, 8, 129024),
    ],
)
def test_the_vocabulary_is_padded_and_cut_back(vocab, divisor, tp, padded):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 8,
        "rms_norm_eps": 1e-6,
    }
    assert (
        padded_vocab_size(
            parse_architecture(config), Layout(tp, make_vocab_size_divisible_by=divisor)
        )
        == padded
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "vocab", full_only([500, 512, 151643, 151936, 128256], [512, 151643, 128256])
)
def test_padded_rows_are_zero_and_do_not_come_back(tmp_path, vocab, tied):
    source = save_model(
        tmp_path / "hf",
        "qwen3",
        tied,
        "bfloat16",
        vocab_size=vocab,
        hidden_size=8,
        num_hidden_layers=1,
    )
    done = import_checkpoint(source, tmp_path / "megatron", tensor_model_parallel_size=4)
    padded = -(-vocab // 512) * 512
    assert done.padding == {"vocab_size": vocab, "padded_vocab_size": padded}
    assert inspect_checkpoint(tmp_path / "megatron", hashes=False)["tensors"][
        "embedding.word_embeddings.weight"
    ]["shape"] == [padded, 8]
    loaded = {
        "embedding.word_embeddings.weight": torch.full((padded, 8), 7.0, dtype=torch.bfloat16)
    }
    dcp.load(loaded, checkpoint_id=tmp_path / "megatron", no_dist=True)
    assert not loaded["embedding.word_embeddings.weight"][vocab:].any()
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    assert filecmp.cmp(
        source / "model.safetensors", tmp_path / "back" / "model.safetensors", shallow=False
    )


def test_several_conversions_in_one_process(tmp_path):
    """Tied, untied, another family, tied again: no conversion leaves a trace in the next."""
    order = [("qwen3", True), ("qwen3", False), ("llama", True), ("qwen2", False), ("qwen3", True)]
    for number, (family, tied) in enumerate(order):
        source = save_model(tmp_path / f"hf{number}", family, tied)
        import_checkpoint(source, tmp_path / f"megatron{number}", verify=True)
    for number in range(len(order)):
        export_checkpoint(tmp_path / f"megatron{number}", tmp_path / f"back{number}")
        back = tmp_path / f"back{number}" / "model.safetensors"
        assert filecmp.cmp(tmp_path / f"hf{number}" / "model.safetensors", back, shallow=False)


def test_export_to_files_of_a_size(tmp_path):
    source = save_model(tmp_path / "hf", "qwen3")
    import_checkpoint(source, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=30_000)
    files = list((tmp_path / "back").glob("model-*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    expected, found = load_model(source), load_model(tmp_path / "back")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert set(expected) == set(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_the_trainers_export_writes_the_same_files(tmp_path):
    """The end of a training run and ``dcpo convert export`` share their writer."""
    source = save_model(tmp_path / "hf", "qwen2", True, "bfloat16", "30KB")
    arch, model = read_architecture(source), load_model(source)
    write_checkpoint(
        tmp_path / "policy",
        source,
        arch,
        torch.bfloat16,
        lambda shapes: {name: model[name] for name in shapes},
        max_bytes=30_000,
    )
    import_checkpoint(source, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=30_000)
    names = [path.name for path in (tmp_path / "policy").iterdir()]
    assert (
        filecmp.cmpfiles(tmp_path / "policy", tmp_path / "back", names, shallow=False)[0] == names
    )


def test_tied_checkpoint_with_a_copy_of_the_embedding(tmp_path):
    """Some tied checkpoints carry ``lm_head.weight`` too: dropped when it is the same, refused when
    it is not.
    """
    from safetensors.torch import save_file

    source = save_model(tmp_path / "hf", "qwen3", True)
    model = load_model(source)
    model["lm_head.weight"] = model["model.embed_tokens.weight"].clone()
    model["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(model, source / "model.safetensors", metadata={"format": "pt"})
    done = import_checkpoint(source, tmp_path / "megatron")
    assert done.ignored == ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    model["lm_head.weight"][3, 3] += 1
    save_file(model, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"ties the embeddings, but lm_head.weight differs"):
        import_checkpoint(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_entry_makes_a_family_convertible(tmp_path, monkeypatch):
    """CONTRIBUTING.md, An architecture: GLM-4 is refused without its entry, and comes back to the
    byte with it.
    """
    from megatron_dcpo.architectures.families import ARCHITECTURES

    source = save_model(tmp_path / "hf", "glm4")
    entry = ARCHITECTURES["Glm4ForCausalLM"]
    monkeypatch.delitem(ARCHITECTURES, "Glm4ForCausalLM")
    with pytest.raises(UserError, match="Glm4ForCausalLM"):
        import_checkpoint(source, tmp_path / "megatron")
    monkeypatch.setitem(ARCHITECTURES, "Glm4ForCausalLM", entry)
    import_checkpoint(source, tmp_path / "megatron", verify=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", verify=True)
    assert filecmp.cmp(
        source / "model.safetensors", tmp_path / "back" / "model.safetensors", shallow=False
    )


def test_record_and_inspection_agree(tmp_path, capsys):
    """``conversion.json`` says what was done; its hashes are those ``inspect`` finds in the Hugging
    Face directory.
    """
    source = save_model(tmp_path / "hf", "llama", False, "bfloat16")
    out = tmp_path / "megatron"
    assert (
        dcpo(["convert", "import", "--from", str(source), "--to", str(out), "--verify", "--json"])
        == 0
    )
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "conversion.json").read_text())
    assert record["tensors"] == {
        k: v["sha256"] for k, v in inspect_checkpoint(source)["tensors"].items()
    }
    assert record["dtype"] == "bfloat16"
    assert record["padding"] == {"vocab_size": 331, "padded_vocab_size": 384}
    assert record["seconds"] > 0
    assert record["verify_seconds"] > 0
    assert record["peak_resident_bytes"] >= record["peak_anonymous_bytes"] > 0
    report = inspect_checkpoint(out)
    assert report["format"] == "torch_dist"
    for name, tensor in expected_megatron(source, 384).items():
        digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        facts = {
            "shape": list(tensor.shape),
            "dtype": "bfloat16",
            "bytes": tensor.nbytes,
            "sha256": digest,
        }
        assert report["tensors"][name] == facts


@pytest.mark.slow
def test_memory_is_one_tensor(tmp_path):
    """200 MB through maps of the files: anonymous memory of the process grows by a chunk that is
    concatenated at most.
    """
    source = save_model(
        tmp_path / "hf", "qwen3", True, vocab_size=200_000, hidden_size=256, num_hidden_layers=1
    )
    assert (source / "model.safetensors").stat().st_size > 200e6
    baseline = _anonymous_bytes()
    imported = import_checkpoint(source, tmp_path / "megatron")
    exported = export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    for done, limit in (
        (imported, 208 * 2**20),
        (exported, 32 * 2**20),
    ):  # import pads the embedding, 195 MiB
        assert done.peak_anonymous_bytes - baseline < limit + 32 * 2**20


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
