"""How the cost of an update grows with group size, prompts, response length, vocabulary; with
ranks.

    python benchmarks/growth.py [--plot growth.png]      # tables; python benchmarks/run.py growth:
    how well the fits fit

Processor time of ``Updater.update`` on made-up responses, minima of rounds in turns. Linear in
everything but the length, where attention is quadratic: there the fit has a square. Ranks: the
training time of a step on 1 and 2 processes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measurement import Measurement, in_turns, train

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
}
PROMPTS, GROUP, LENGTH = 4, 8, 64
AXES: dict[str, tuple[tuple[int, ...], int]] = {  # values, degree of the fit
    "group size": ((2, 4, 8, 16, 24, 32), 1),
    "prompts": ((1, 2, 4, 8, 12, 16), 1),
    "response length": ((64, 128, 256, 512, 768, 1024), 2),
    "vocabulary": ((2048, 4096, 8192, 16384, 24576, 32768), 1),
}
ROUNDS = 4


def costs(axis: str) -> list[float]:
    """Seconds of an update at every value of ``axis``."""
    import policies

    from megatron_dcpo.runtime.distributed import destroy

    def point(run: Any, samples: list[Any]) -> Callable[[], Any]:
        return lambda: run.updater.update(samples, 1)

    found: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        groups = [AXES[axis][0]] if axis != "vocabulary" else [(value,) for value in AXES[axis][0]]
        for values in groups:
            shape = SHAPE | ({"vocab_size": values[0]} if axis == "vocabulary" else {})
            model = policies.write_policy(Path(scratch, f"policy{values[0]}"), shape)
            more = ["training.micro_batch_size=8", "rollout.max_response_length=1024"]
            options = policies.overrides(model, Path(scratch, "run"), PROMPTS, GROUP, LENGTH, *more)
            with policies.training_run(options) as run:
                calls = {str(v): point(run, made_up(run, axis, v)) for v in values}
                found += [min(turns.cpu) for turns in in_turns(ROUNDS, **calls).values()]
            destroy()
    return found


def made_up(run: Any, axis: str, value: int) -> list[Any]:
    """Judged responses of random tokens."""

    from megatron_dcpo.types import Judgement, Response, TrainingSample

    sizes = {"prompts": PROMPTS, "group size": GROUP, "response length": LENGTH} | {axis: value}
    rng, length = np.random.default_rng(0), sizes["response length"]
    samples = []
    for prompt in run.sampler.draw(0, sizes["prompts"]):
        for index in range(sizes["group size"]):
            ids, logprobs = rng.integers(0, 200, length), np.full(length, -7.0, np.float32)
            response = Response(prompt.prompt_id, index, ids, logprobs, "length", 0)
            judgement = Judgement(prompt.prompt_id, index % 2, None, "missing", length, length)
            samples.append(TrainingSample(prompt, response, judgement))
    return samples


def fit(x: np.ndarray, y: np.ndarray, degree: int) -> tuple[np.ndarray, float]:
    """Coefficients, the highest power first, and R^2."""
    coefficients = np.polyfit(x, y, degree)
    rest = y - np.polyval(coefficients, x)
    return coefficients, float(1 - rest.var() / y.var())


def ranks() -> dict[int, float]:
    """Median seconds of the update of a step, by number of data-parallel processes."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = {n: train(Path(scratch, f"run{n}"), "training.steps=8", processes=n) for n in (1, 2)}
    return {
        n: float(np.median([row["time/train"] for row in found[2:]])) for n, found in rows.items()
    }


def measurements() -> Iterator[Measurement]:
    for axis, (values, degree) in AXES.items():
        seconds = costs(axis)
        _, r2 = fit(np.array(values, float), np.array(seconds), degree)
        raw = {"values": values, "cpu_s": seconds}
        how = "linear" if degree == 1 else "quadratic"
        yield Measurement(
            f"growth/{axis}",
            r2,
            1.0,
            f"R2 of a {how} fit",
            "a perfect fit",
            0.99,
            at_least=True,
            raw=raw,
        )
    one, two = ranks().values()
    unit = "s of training per step on 2 processes (wall time)"
    yield Measurement("growth/ranks", two, one, unit, "1 process", reason="0.5 with two idle cores")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    found = {axis: costs(axis) for axis in AXES}
    for axis, seconds in found.items():
        values, degree = AXES[axis]
        coefficients, r2 = fit(np.array(values, float), np.array(seconds), degree)
        print(f"\n{axis:>16} {'s':>9}")
        for value, second in zip(values, seconds, strict=True):
            print(f"{value:16} {second:9.4f}")
        print(
            f"fit, highest power first: {', '.join(f'{c:.3g}' for c in coefficients)}; R2 {r2:.4f}"
        )
    if args.plot:
        plot(found, args.plot)


def plot(found: dict[str, list[float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3), layout="constrained")
    for axes, (axis, seconds) in zip(
        np.atleast_1d(figure.subplots(1, len(found))), found.items(), strict=True
    ):
        values, degree = AXES[axis]
        x = np.linspace(0, max(values), 50)
        axes.plot(
            x,
            np.polyval(fit(np.array(values, float), np.array(seconds), degree)[0], x),
            color="0.7",
        )
        axes.plot(values, seconds, "o")
        axes.set(xlabel=axis, ylabel="s of processor time", ylim=(0, None))
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
