"""How fast is a conversion, and how much memory does it take, next to ``cp`` of the same bytes on
the same disk?

    python benchmarks/convert.py --shape qwen3_0.6b --dir /path/on/the/disk [--repeats 3] [--warm]
    [--naive]

Writes a random bf16 checkpoint of the shape, then in turn: cp, import, cp, export, each in its own
process, the input evicted from the page cache before each (``--warm``: read into it instead) and
the disk idle (``sync``). Times exclude the start of the interpreter and imports. ``--naive`` adds
the usual way (load everything, rearrange, save) for comparison; it needs room for the whole model
twice. ``--peer PYTHON`` adds Megatron-Bridge, run by an interpreter made as ``megatron_bridge.py``
says. ``--once`` takes twice the checkpoint on the disk instead of three times: one round without
the second cp, the source removed after the import and compared with the result by hash. Everything
is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from measurement import DATA, QUICK, Measurement

from megatron_dcpo.architectures.config_json import parse_architecture, read_architecture
from megatron_dcpo.conversion.common import PeakMemory
from megatron_dcpo.conversion.convert import export_checkpoint, import_checkpoint
from megatron_dcpo.weights.hf_checkpoint import HFReader, assign_files, plan_shards, write_index
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.planner import plan
from megatron_dcpo.weights.table import hf_shapes

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def _shape(layers: int, hidden: int, ffn: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return _COMMON | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "tiny": _shape(4, 256, 512, 8) | {"vocab_size": 1000, "head_dim": 32},
    "qwen3_0.6b": _shape(28, 1024, 3072, 16, tied=True),
    "qwen3_4b": _shape(36, 2560, 9728, 32, tied=True),
    "qwen3_8b": _shape(36, 4096, 12288, 32),
    "qwen3_14b": _shape(40, 5120, 17408, 40),
}

Results = dict[str, list[dict[str, float]]]  # of every step, its rounds


def generate(config: dict[str, Any], out: Path) -> int:
    """Write a checkpoint of random bits with the shapes of ``config``; returns its bytes. Holds one
    block at a time.
    """
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    specs = {
        name: (shape, "bfloat16") for name, shape in hf_shapes(parse_architecture(config)).items()
    }
    shards = plan_shards(specs, assign_files(specs))
    rng = np.random.default_rng(0)
    for shard in shards:
        with (out / shard.file).open("wb") as file:
            file.write(shard.header)
            left = shard.nbytes - len(shard.header)
            while left:
                block = rng.integers(0, 2**16, min(left // 2, 2**23), np.uint16)
                file.write(memoryview(block).cast("B"))
                left -= 2 * len(block)
    write_index(out, shards)
    return sum(shard.nbytes for shard in shards)


def naive_import(source: Path, target: Path) -> None:
    """Load every tensor, rearrange, save with torch.distributed.checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    model = {}
    for file in sorted(source.glob("*.safetensors")):
        model |= load_file(file)
    state: dict[str, list[Any]] = {}
    for copy in plan(read_architecture(source), Layout(transformer_engine=True), Coordinates()):
        tensor = model[copy.hf]
        state.setdefault(copy.megatron, []).append(
            tensor.narrow(copy.dim, copy.hf_start, copy.length)
        )
    dcp.save(
        {name: torch.cat(parts) for name, parts in state.items()},
        checkpoint_id=target,
        no_dist=True,
    )


def naive_export(source: Path, target: Path) -> None:
    """Load every tensor of an imported checkpoint, rearrange, save with safetensors."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    arch = read_architecture(source / "hf")
    metadata = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=torch.bfloat16)
        for key, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=source, no_dist=True)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in hf_shapes(arch).items()
    }
    for copy in plan(arch, Layout(transformer_engine=True), Coordinates()):
        stacked = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", copy.megatron)
        tensor = (
            state[f"decoder.layers.{stacked[2]}"][int(stacked[1])]
            if stacked
            else state[copy.megatron]
        )
        values = tensor.narrow(copy.dim, copy.start, copy.length)
        tensors[copy.hf].narrow(copy.dim, copy.hf_start, copy.length).copy_(values)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


STEPS = {
    "import": import_checkpoint,
    "export": export_checkpoint,
    "naive_import": naive_import,
    "naive_export": naive_export,
}


def _peer_command(python: str, step: str, source: Path, target: Path) -> list[str]:
    config = source if (source / "config.json").is_file() else source.parent / "hf"
    script = Path(__file__).with_name("megatron_bridge.py")
    return [python, str(script), step.removeprefix("peer_"), str(source), str(target), str(config)]


def worker(step: str, source: Path, target: Path) -> None:
    """In a process of its own: run one step, print seconds and peak memory."""
    import safetensors.torch  # noqa: F401 - imports are not part of the time
    import torch.distributed.checkpoint  # noqa: F401

    memory = PeakMemory()
    clock = time.perf_counter()
    with memory:
        STEPS[step](source, target)
    seconds = time.perf_counter() - clock
    peaks = {
        "peak_anonymous_bytes": memory.anonymous_bytes,
        "peak_resident_bytes": memory.resident_bytes,
    }
    print(json.dumps({"seconds": seconds} | peaks))


def measure(
    step: str, source: Path, target: Path, warm: bool, peer: str | None = None
) -> dict[str, float]:
    """One step from a quiet disk and a defined page cache. Removes the target it has written,
    unless it is needed.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for path in source.rglob("*"):
        if path.is_file():
            _cache(path, warm)
    if step == "cp":
        clock = time.perf_counter()
        subprocess.run(["cp", "-r", source, target], check=True)
        return {"seconds": time.perf_counter() - clock}
    command = [sys.executable, __file__, "--worker", step, str(source), str(target)]
    if step.startswith("peer_"):
        assert peer is not None
        command = _peer_command(peer, step, source, target)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{step} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _cache(path: Path, warm: bool) -> None:
    with path.open("rb") as file:
        if warm:
            while file.read(2**24):
                pass
        else:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_0.6b")
    parser.add_argument("--dir", type=Path, help="where to work; removed at the end")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--warm", action="store_true", help="input in the page cache instead of evicted from it"
    )
    parser.add_argument("--naive", action="store_true", help="also load everything, then save")
    parser.add_argument(
        "--peer", metavar="PYTHON", help="interpreter of an environment with Megatron-Bridge"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="directory of a tokenizer: the peer does not do without"
    )
    parser.add_argument("--once", action="store_true", help="for small disks: see above")
    parser.add_argument("--worker", nargs=3, metavar=("STEP", "FROM", "TO"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], Path(args.worker[1]), Path(args.worker[2]))
        return
    if args.dir is None:
        parser.error("--dir is required")
    if args.peer and not args.tokenizer:
        parser.error("--peer needs --tokenizer")
    work = args.dir / f"convert-{args.shape}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        (run_once if args.once else run)(args, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run(args: argparse.Namespace, work: Path) -> None:
    nbytes = generate(SHAPES[args.shape], work / "hf")
    print(
        f"{args.shape}: {nbytes / 1e9:.2f} GB, input {'in' if args.warm else 'not in'} the page "
        "cache",
        flush=True,
    )
    steps = list(STEPS_OF_A_ROUND)
    if args.naive:
        steps += [("naive_import", "hf", "naive"), ("naive_export", "megatron", "naive")]
    if args.peer:
        for path in args.tokenizer.glob("tokenizer*"):
            shutil.copy(path, work / "hf")
        steps += PEER_STEPS
    summarise(args.shape, in_turns(work, steps, args.repeats, args.warm, args.peer)[0])


def in_turns(
    work: Path, steps: Sequence[tuple[str, str, str]], repeats: int, warm: bool, peer: str | None
) -> tuple[Results, bool]:
    """All steps in turn, ``repeats`` times; their results, and whether every round trip gave the
    same files.
    """
    results: Results = {}
    all_same = True
    for _ in range(repeats):
        for step, source, target in steps:
            result = measure(step, work / source, work / target, warm, peer)
            results.setdefault(step, []).append(result)
            print(f"  {step:13s} {result['seconds']:8.2f} s", flush=True)
            if target in ("copy", "naive", "peer_back"):
                shutil.rmtree(work / target)
        same = HFReader(work / "back").specs == HFReader(work / "hf").specs and all(
            subprocess.run(["cmp", path, work / "back" / path.name]).returncode == 0
            for path in (work / "hf").glob("*.safetensors")
        )
        print(
            f"  files after the round trip are {'identical' if same else 'DIFFERENT'}", flush=True
        )
        shutil.rmtree(work / "back")
        all_same &= same
    return results, all_same


STEPS_OF_A_ROUND = [
    ("cp", "hf", "copy"),
    ("import", "hf", "megatron"),
    ("cp", "megatron", "copy"),
    ("export", "megatron", "back"),
]
PEER_STEPS = [("peer_import", "hf", "peer"), ("peer_export", "peer", "peer_back")]


def warm_rounds(shape: str, repeats: int, peer: str | None = None) -> tuple[Results, bool]:
    """For ``run.py``: everything in the page cache, in a temporary directory."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        generate(SHAPES[shape], work / "hf")
        for path in (DATA / "qwen_tokenizer").glob("tokenizer*") if peer else ():
            shutil.copy(path, work / "hf")
        return in_turns(
            work, STEPS_OF_A_ROUND + PEER_STEPS * (peer is not None), repeats, True, peer
        )


def compared(
    name: str, results: Results, ours: str, other: str, other_is: str, **fields: Any
) -> Measurement:
    """Medians of two steps."""
    raw = {step: [round(r["seconds"], 3) for r in results[step]] for step in (ours, other)}
    a, b = (statistics.median(raw[step]) for step in (ours, other))
    unit = f"s (wall time without start-up, median of {len(raw[ours])}, in the page cache)"
    return Measurement(name, a, b, unit, other_is, raw=raw, **fields)


def measurements() -> Iterator[Measurement]:
    """1.2 GB there and back. There is no goal: half of a conversion's time is SHA-256 of every
    tensor.
    """
    shape, repeats = ("tiny", 1) if QUICK else ("qwen3_0.6b", 3)
    results, same = warm_rounds(shape, repeats)
    for step in ("import", "export"):
        yield compared(f"convert/{step}", results, step, "cp", "cp of the same bytes", same=same)


def run_once(args: argparse.Namespace, work: Path) -> None:
    """cp, import, export with two copies on the disk; the tensors are compared by the hashes that
    both steps record.
    """
    nbytes = generate(SHAPES[args.shape], work / "hf")
    print(
        f"{args.shape}: {nbytes / 1e9:.2f} GB, input {'in' if args.warm else 'not in'} the page "
        "cache",
        flush=True,
    )
    results: Results = {}
    for step, source, target, done in (
        ("cp", "hf", "copy", "copy"),
        ("import", "hf", "megatron", "hf"),
        ("export", "megatron", "back", "megatron"),
    ):
        results[step] = [measure(step, work / source, work / target, args.warm)]
        print(f"  {step:13s} {results[step][0]['seconds']:8.2f} s", flush=True)
        if target == "megatron":
            imported = json.loads((work / target / "conversion.json").read_text())["tensors"]
        shutil.rmtree(work / done)
    exported = json.loads((work / "back" / "conversion.json").read_text())["tensors"]
    print(
        "  tensors after the round trip are "
        f"{'identical' if imported == exported else 'DIFFERENT'}",
        flush=True,
    )
    summarise(args.shape, results)


def summarise(shape: str, results: Results) -> None:
    """One JSON line per step: the median time, its ratio to that of cp, the largest memory."""
    seconds = {
        step: statistics.median(result["seconds"] for result in runs)
        for step, runs in results.items()
    }
    for step, runs in results.items():
        line = {"step": step, "shape": shape, "seconds": round(seconds[step], 2)}
        line["ratio_to_cp"] = round(seconds[step] / seconds["cp"], 2)
        for what in ("anonymous", "resident"):
            if f"peak_{what}_bytes" in runs[0]:
                line[f"peak_{what}_mib"] = round(
                    max(result[f"peak_{what}_bytes"] for result in runs) / 2**20
                )
        if f"peer_{step}" in seconds:
            line["ratio_to_peer"] = round(seconds[step] / seconds[f"peer_{step}"], 2)
        print(json.dumps(line))


if __name__ == "__main__":
    main()
