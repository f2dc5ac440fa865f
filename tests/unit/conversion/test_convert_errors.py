"""Bad input, a full disk, a killed process: one clear line, and nothing that looks like a
result.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_dcpo.cli import main as dcpo
from megatron_dcpo.conversion.convert import export_checkpoint, import_checkpoint
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.files import new_directory
from tests.helpers import warm
from tests.helpers.checkpoints import load_model, save_model
from tests.helpers.paths import REPOSITORY
from tools.inspect_checkpoint import inspect_checkpoint


def _truncate(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - nbytes)


def _resave(**tensors: torch.Tensor | None) -> Callable[[Path], None]:
    """Replace (or with ``None`` remove) tensors, named with ``__`` for the dots."""

    def change(model_dir: Path) -> None:
        model = load_model(model_dir)
        for key, tensor in tensors.items():
            name = key.replace("__", ".")
            model.pop(name, None)
            if tensor is not None:
                model[name] = tensor
        for file in model_dir.glob("*.safetensors*"):
            file.unlink()
        save_file(model, model_dir / "model.safetensors", metadata={"format": "pt"})

    return change


def _config(**changes: object) -> Callable[[Path], None]:
    def change(model_dir: Path) -> None:
        config = json.loads((model_dir / "config.json").read_text())
        for key, value in changes.items():
            config.pop(key, None)
            if value is not None:
                config[key] = value
        (model_dir / "config.json").write_text(json.dumps(config))

    return change


NORM = "model.layers.1.input_layernorm.weight"
# one of each reader; the others are in test_refused_weights and test_hostile_models
IMPORT_CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated weights": (
        lambda d: _truncate(d / "model.safetensors", 10),
        ["model.safetensors"],
    ),
    "a missing tensor": (_resave(**{NORM.replace(".", "__"): None}), [NORM]),
    "one tensor of another type": (
        _resave(**{NORM.replace(".", "__"): torch.ones(32).half()}),
        [NORM, "float16"],
    ),
    "an unknown architecture": (
        _config(architectures=["MambaForCausalLM"]),
        ["MambaForCausalLM"],
    ),
    "no config.json": (lambda d: (d / "config.json").unlink(), ["config.json"]),
}


@pytest.mark.parametrize("case", IMPORT_CASES)
def test_import_refuses_by_name(tmp_path, capsys, case):
    source = save_model(tmp_path / "hf", "qwen3")
    change, named = IMPORT_CASES[case]
    change(source)
    capsys.readouterr()
    assert dcpo(["convert", "import", "--from", str(source), "--to", str(tmp_path / "out")]) == 2
    _one_line(capsys.readouterr().err, named)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "nothing left behind"


def _one_line(text: str, named: list[str]) -> None:
    (line,) = text.splitlines()
    assert line.startswith("dcpo convert: error: "), text
    assert [name for name in named if name not in line] == [], line


def _edit_metadata(change: Callable[[object], None]) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
        change(metadata)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))

    return edit


def _without(key: str) -> Callable[[Path], None]:
    return _edit_metadata(lambda metadata: metadata.state_dict_metadata.pop(key))


def _extra(metadata) -> None:
    key, other = "decoder.final_layernorm.weight", "decoder.final_layernorm.bias"
    metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
    for index, info in list(metadata.storage_data.items()):
        if index.fqn == key:
            metadata.storage_data[type(index)(other, index.offset)] = info


def _scribble(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.distcp"):
        data = bytearray(path.read_bytes())
        data[:] = bytes(len(data))
        path.write_bytes(data)


class _Malicious:
    def __reduce__(self):
        return os.system, ("echo pwned > pwned.txt",)


EXPORT_CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated data": (lambda d: _truncate(d / "__0_0.distcp", 5000), ["__0_0.distcp"]),
    "missing data": (lambda d: (d / "__0_0.distcp").unlink(), ["__0_0.distcp"]),
    "overwritten data": (_scribble, ["__0_0.distcp"]),
    "damaged metadata": (lambda d: _truncate(d / ".metadata", 50), [".metadata"]),
    "metadata that runs code": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps(_Malicious())),
        [".metadata"],
    ),
    "no metadata": (lambda d: (d / ".metadata").unlink(), ["torch_dist"]),
    "a missing tensor": (_without("output_layer.weight"), ["output_layer.weight"]),
    "no model": (_without("embedding.word_embeddings.weight"), ["GPT"]),
    "a superfluous tensor": (_edit_metadata(_extra), ["decoder.final_layernorm.bias"]),
    "no config.json": (lambda d: (d / "hf" / "config.json").unlink(), ["--hf-config"]),
    "another number of layers": (
        lambda d: _config(num_hidden_layers=3)(d / "hf"),
        ["4 layers", "config.json", "3"],
    ),
    "another width": (
        lambda d: _config(intermediate_size=64)(d / "hf"),
        ["linear_fc1.weight"],
    ),
    "a larger vocabulary": (
        lambda d: _config(vocab_size=400)(d / "hf"),
        ["embeddings.weight", "[384, 32]"],
    ),
    "tied, but an output layer": (
        lambda d: _config(tie_word_embeddings=True)(d / "hf"),
        ["output_layer"],
    ),
}


@pytest.mark.parametrize("case", EXPORT_CASES)
def test_export_refuses_by_name(tmp_path, capsys, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    import_checkpoint(save_model(tmp_path / "hf", "qwen3"), tmp_path / "megatron")
    change, named = EXPORT_CASES[case]
    change(tmp_path / "megatron")
    capsys.readouterr()
    assert dcpo(["convert", "export", "--from", "megatron", "--to", "out"]) == 2
    _one_line(capsys.readouterr().err, named)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"], (
        "nothing left behind, no code run"
    )


def test_target_in_use_or_unwritable(tmp_path):
    source = save_model(tmp_path / "hf", "qwen3")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="exists; remove it"):
        import_checkpoint(source, tmp_path / "used")
    assert (tmp_path / "used" / "mine.txt").read_text() == "keep"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*Not a directory"):
        import_checkpoint(source, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    import_checkpoint(source, tmp_path / "empty")
    import_checkpoint(source, tmp_path / "used", overwrite=True)
    assert inspect_checkpoint(tmp_path / "used") == inspect_checkpoint(tmp_path / "empty")


def test_the_input_is_never_replaced(tmp_path):
    source = save_model(tmp_path / "hf", "qwen3")
    before = sorted(path.name for path in source.iterdir())
    for target in (source, tmp_path):
        with pytest.raises(UserError, match="it holds the input"):
            import_checkpoint(source, target, overwrite=True)
    import_checkpoint(source, tmp_path / "megatron")
    for target in (source, tmp_path / "megatron"):
        with pytest.raises(UserError, match="it holds the input"):
            export_checkpoint(tmp_path / "megatron", target, hf_config=source, overwrite=True)
    assert sorted(path.name for path in source.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_target_without_permission(tmp_path):
    source = save_model(tmp_path / "hf", "qwen3")
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(UserError, match=r"cannot write .*Permission denied"):
        import_checkpoint(source, tmp_path / "locked" / "out")


def _convert(
    source: Path, target: Path, verb: str, limit: int = 0, kill: int = 0
) -> subprocess.CompletedProcess:
    words = [verb, str(source), str(target), str(limit), str(int(kill))]
    return warm.run("tests.helpers.interrupted_conversion", words, [os.environ], timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["import_checkpoint", "export_checkpoint"])
def test_the_disk_refuses_in_the_middle(tmp_path, verb):
    """The system refuses to let a file grow beyond 100 kB, as a full disk or a quota would."""
    source = save_model(tmp_path / "hf", "qwen3")
    if verb == "export_checkpoint":
        import_checkpoint(source, tmp_path / "megatron")
        source = tmp_path / "megatron"
    before = sorted(path.name for path in tmp_path.iterdir())
    done = _convert(source, tmp_path / "out", verb, limit=100_000)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(
        f"cannot write {tmp_path / 'out'}: File too large; nothing was left behind"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """A file system of 256 KiB: refused beforehand by the free space, and by the disk itself when
    that check is off.
    """
    source, disk = save_model(tmp_path / "hf", "qwen3"), tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True
    )
    if mount.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        with pytest.raises(UserError, match=r"needs 0.00 GB, .* free"):
            import_checkpoint(source, disk / "out")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megatron_dcpo.conversion.convert.check_free_space", lambda *_: None)
            with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
                import_checkpoint(source, disk / "out")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("verb", ["import_checkpoint", "export_checkpoint"])
@pytest.mark.slow
def test_killed_in_the_middle(tmp_path, verb):
    """SIGKILL leaves no target; the next attempt succeeds and clears away what was left under the
    temporary name.
    """
    source = save_model(tmp_path / "hf", "qwen3")
    if verb == "export_checkpoint":
        import_checkpoint(source, tmp_path / "megatron")
        source = tmp_path / "megatron"
    assert (
        _convert(source, tmp_path / "out", verb, kill=signal.SIGKILL).returncode == -signal.SIGKILL
    )
    assert not (tmp_path / "out").exists()
    left = tmp_path / "out.tmp"
    assert left.is_dir()
    assert not (left / ".metadata").exists(), "what is left does not pass for a checkpoint"
    assert not (left / "config.json").exists(), "nor for a Hugging Face directory"
    assert _convert(source, tmp_path / "out", verb).returncode == 0
    assert not left.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_interrupt_removes_the_temporary_directory(tmp_path, number):
    """Ctrl-C and a polite kill: the temporary directory goes too, and the parents that were made
    for it.
    """
    source = save_model(tmp_path / "hf", "qwen3")
    assert (
        _convert(
            source, tmp_path / "new" / "parent" / "out", "import_checkpoint", kill=number
        ).returncode
        != 0
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_directory_of_somebody_else_is_never_removed(tmp_path):
    """``m.tmp`` that no conversion left, a symlink as target, and a target that another process is
    writing.
    """
    source = save_model(tmp_path / "hf", "qwen3")
    (tmp_path / "m.tmp").mkdir()
    (tmp_path / "m.tmp" / "notes").write_text("mine")
    with pytest.raises(UserError, match=r"m\.tmp is in the way"):
        import_checkpoint(source, tmp_path / "m", overwrite=True)
    assert (tmp_path / "m.tmp" / "notes").read_text() == "mine"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="link exists"):
        import_checkpoint(source, tmp_path / "link", overwrite=True)
    with new_directory(tmp_path / "busy") as temporary:
        (temporary / "half").touch()
        with pytest.raises(UserError, match=r"another process is writing .*busy"):
            import_checkpoint(source, tmp_path / "busy")
        assert (temporary / "half").exists()
    assert [path.name for path in (tmp_path / "busy").iterdir()] == ["half"]


def test_killed_while_the_earlier_directory_is_removed(tmp_path):
    """The new one is there by then, and nothing of the earlier one is left by the next."""
    out = tmp_path / "out"

    def write(name):
        with new_directory(out, overwrite=True) as temporary:
            for number in range(3):
                (temporary / f"{name}{number}").touch()

    def killed_after_one_file(path, **options):
        next(file for file in Path(path).rglob("*0")).unlink()
        os._exit(9)

    write("old")
    child = os.fork()
    if not child:
        shutil.rmtree = killed_after_one_file
        write("new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert {"new0", "new1", "new2"} <= {path.name for path in out.iterdir()}
    write("last")
    assert {path.name for path in out.iterdir()} == {"last0", "last1", "last2"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_earlier_directory_stays_if_the_new_one_cannot_have_its_name(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with new_directory(out) as temporary:
        (temporary / "old").touch()
    replace = os.replace

    def refuses(source, target):
        if (Path(source).name, Path(target).name) == ("out.tmp", "out"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuses)
    with (
        pytest.raises(UserError, match="No space left"),
        new_directory(out, overwrite=True) as temporary,
    ):
        (temporary / "new").touch()
    assert [path.name for path in out.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_everything_but_weights_travels(tmp_path):
    source = save_model(tmp_path / "hf", "qwen3")
    for name in (
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    for name in ("pytorch_model.bin", ".gitattributes"):
        (source / name).write_text("not of this model")
    import_checkpoint(source, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back")
    for name in (
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
    ):
        assert (tmp_path / "back" / name).read_text() == name
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()
    assert not (tmp_path / "back" / ".gitattributes").exists()


@pytest.mark.parametrize("verb", ["import", "export"])
def test_verification_notices_one_wrong_bit(tmp_path, monkeypatch, verb):
    """The result is damaged between writing and verification: no result."""
    from megatron_dcpo.conversion import convert

    source = save_model(tmp_path / "hf", "qwen3")
    import_checkpoint(source, tmp_path / "megatron")
    verify = convert.verify_bytes

    def damage_and_verify(**arguments):
        path = max(tmp_path.glob("out.tmp/*.*"), key=lambda path: path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(-20_000, os.SEEK_END)
            byte = file.read(1)
            file.seek(-20_000, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        return verify(**arguments)

    monkeypatch.setattr(convert, "verify_bytes", damage_and_verify)
    run = import_checkpoint if verb == "import" else export_checkpoint
    with pytest.raises(UserError, match=r"verification failed: .* reads back differently"):
        run(source if verb == "import" else tmp_path / "megatron", tmp_path / "out", verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


@pytest.mark.parametrize("tool", ["hf_to_megatron", "megatron_to_hf", "inspect_checkpoint"])
@pytest.mark.slow
def test_tools_run_on_their_own(tmp_path, tool):
    """Started by path from anywhere; help, and one line for a directory that is not there."""
    command = [sys.executable, str(REPOSITORY / "tools" / f"{tool}.py")]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0
    assert "--json" in done.stdout
    arguments = (
        ["nowhere"]
        if tool == "inspect_checkpoint"
        else ["--load-dir", "nowhere", "--save-dir", "out"]
    )
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nowhere" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", ["", "snapshot"])
def test_source_under_the_temporary_name_of_the_target(tmp_path, inside):
    """``m`` is first written as ``m.tmp``, and what is left there of a killed run is removed: never
    the input.
    """
    source = save_model(tmp_path / "m.tmp" / inside, "qwen3", True)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(UserError, match=r"m\.tmp: it holds the input"):
        import_checkpoint(source, tmp_path / "m", overwrite=True)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not (tmp_path / "m").exists()
