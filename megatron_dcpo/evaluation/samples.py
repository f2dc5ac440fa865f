"""The judged sample: one line of ``samples.jsonl``, all that scoring needs and all that judging
again needs.

``SampleLog`` holds the samples of an evaluation in progress: each is on disk as soon as it is
judged, and none is sampled twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, get_args, get_origin, get_type_hints

import numpy as np

from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.data.files import read_json_lines
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.text import read_json_object


@dataclass(frozen=True)
class Sample:
    """One response to one problem of a benchmark, judged.

    ``confidence`` (verbal) is ``None`` exactly when ``status`` is not ``ok``. ``token_confidence``
    is exp(mean log p), the geometric mean over the ``num_tokens`` sampled tokens, EOS included, of
    the raw logits (no temperature); ``reasoning_logprob`` (nats) is the sum over the
    ``reasoning_tokens`` of the reasoning block alone, where an engine tells which those are;
    ``kind`` of the problem, where the data says it; ``min_logprob`` (nats) is the least likely of
    them, ``mean_entropy`` (nats) the mean over tokens of the entropy of the engine's largest
    log-probs, what is left of the mass counting as one more token, hence a lower bound.
    ``consistency_confidence`` is the share of the problem's repeats whose answer is equivalent to
    this one; ``None`` without an answer. ``features``: what post-hoc predictors read
    (``posthoc.features``), where asked for. For programs ``answer`` is the program,
    ``ground_truth`` the key of its tests and ``category`` how it ended. ``row``: the columns that a
    verifier reads, ``logged`` what it gave; ``form`` of the answer to a question (``choice``,
    ``short``); ``abstained``: the box says that the answer is not known. ``thinking_characters`` of
    ``response``, and ``thinking_tokens``, are before the answer, where there is a thinking.
    """

    benchmark: str
    prompt_id: str
    repeat: int
    problem: str
    response: str
    answer: str | None
    ground_truth: str
    correct: bool
    confidence: float | None
    status: str
    token_confidence: float | None
    min_logprob: float | None
    num_tokens: int
    finish_reason: str
    consistency_confidence: float | None = None
    mean_entropy: float | None = None
    features: list[float] | None = None
    posthoc_confidence: float | None = None
    category: str | None = None
    reasoning_logprob: float | None = None
    reasoning_tokens: int | None = None
    kind: str | None = None
    row: dict[str, Any] | None = None
    logged: dict[str, Any] | None = None
    form: str | None = None
    abstained: bool | None = None
    thinking_characters: int | None = None
    thinking_tokens: int | None = None


# left out of the file where there is none
_OPTIONAL = frozenset(
    {
        "mean_entropy",
        "features",
        "posthoc_confidence",
        "category",
        "reasoning_logprob",
        "reasoning_tokens",
        "kind",
    }
    | {"row", "logged", "form", "abstained", "thinking_characters", "thinking_tokens"}
)


# beyond them scoring would overflow; engines round a log-prob of 0 up
_RANGES = {
    "num_tokens": (0, 1 << 40),
    "repeat": (0, 1 << 40),
    "reasoning_tokens": (0, 1 << 40),
    "thinking_characters": (0, 1 << 40),
    "thinking_tokens": (0, 1 << 40),
    "token_confidence": (0, 1),
    "min_logprob": (-math.inf, 1e-3),
    "mean_entropy": (-1e-3, math.inf),
    "reasoning_logprob": (-math.inf, 0),
}


def with_consistency(
    samples: Sequence[Sample], equivalent: Callable[[str, str], bool]
) -> list[Sample]:
    """Fill in ``consistency_confidence``: agreement among the repeats of a problem, itself
    included.

    ``equivalent(a, b)`` decides whether two answers are the same; equal strings are never asked
    about. A new answer joins the first class whose representative it is equivalent to.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault((sample.benchmark, sample.prompt_id), []).append(index)
    result = list(samples)
    for members in groups.values():
        classes = answer_classes([samples[i].answer for i in members], equivalent)
        for i, name in zip(members, classes, strict=True):
            agreement = classes.count(name) / len(members) if name is not None else None
            result[i] = replace(samples[i], consistency_confidence=agreement)
    return result


def answer_classes(
    answers: Sequence[str | None], equivalent: Callable[[str, str], bool]
) -> list[str | None]:
    """Return, for every answer, the representative of its class, ``None`` for no answer."""
    representative: dict[str, str] = {}
    for answer in answers:
        if answer is None or answer in representative:
            continue
        known = dict.fromkeys(representative.values())
        representative[answer] = next(
            (other for other in known if equivalent(answer, other)), answer
        )
    return [None if answer is None else representative[answer] for answer in answers]


def write_samples(samples: Iterable[Sample], path: str | Path) -> None:
    """Complete or not there: an older file stays until the new one is written."""
    write_atomically(Path(path), "".join(map(sample_line, samples)))


def sample_line(sample: Sample) -> str:
    row = {
        key: value
        for key, value in asdict(sample).items()
        if key not in _OPTIONAL or value is not None
    }
    return json.dumps(json_ready(row), ensure_ascii=False) + "\n"


def read_samples(path: str | Path, allow_truncated: bool = False) -> list[Sample]:
    """Return samples as written; unknown keys are ignored, a broken or incomplete line is a
    ``UserError``.

    ``allow_truncated``: a broken last line, as a killed evaluation leaves it, is left out.
    """
    known = {field.name for field in fields(Sample)}
    hints = get_type_hints(Sample)
    samples = []
    for where, row in read_json_lines(path, allow_truncated):
        try:
            sample = Sample(**{key: value for key, value in row.items() if key in known})
        except TypeError as error:
            reason = str(error).replace("Sample.__init__() ", "")
            raise UserError(f"{where}: not a sample of dcpo evaluate ({reason})") from None
        for name, hint in hints.items():
            value = getattr(sample, name)
            low, high = _RANGES.get(name, (-math.inf, math.inf))
            if not _fits(value, hint) or (
                name in _RANGES and value is not None and not low <= value <= high
            ):
                raise UserError(
                    f"{where}: not a sample of dcpo evaluate ({name} is {repr(value)[:40]})"
                )
        samples.append(sample)
    return samples


def _fits(value: Any, hint: Any) -> bool:
    """Return whether ``value`` is of one of the types in ``hint``."""
    if value is None:
        return type(None) in get_args(hint)
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if isinstance(value, list):
        return any(
            get_origin(kind) is list and all(_fits(item, get_args(kind)[0]) for item in value)
            for kind in kinds
        )
    if isinstance(value, int | float) and not isinstance(value, bool) and float in kinds:
        return abs(value) < 1e300
    return type(value) in [get_origin(kind) or kind for kind in kinds]


def mean_entropy(top_logprobs: np.ndarray | None) -> float | None:
    """Return the mean over tokens of -sum p log p of the K largest [T, K] and of the remaining
    mass, in nats.
    """
    if top_logprobs is None or top_logprobs.size == 0:
        return None
    logp = top_logprobs.astype(np.float64)
    p = np.exp(logp)
    rest = np.clip(1.0 - p.sum(axis=-1), 0.0, 1.0)
    known = np.where(p > 0, -p * np.where(p > 0, logp, 0.0), 0.0).sum(axis=-1)
    return float(np.mean(known - rest * np.log(np.where(rest > 0, rest, 1.0))))


def geometric_mean_probability(logprobs: Sequence[float]) -> float | None:
    """Return exp(mean log p), in [0, 1]; ``None`` for an empty response."""
    return min(1.0, math.exp(math.fsum(logprobs) / len(logprobs))) if len(logprobs) else None


FILE, SETTINGS = "samples.jsonl", "settings.json"


class SampleLog:
    """``samples.jsonl`` of a run directory, appended to line by line, with ``settings.json`` beside
    it.

    A directory that holds samples drawn with other settings is refused: they must not be mixed. A
    last line that a killed process left unfinished is cut off; its sample is drawn again.
    """

    def __init__(
        self, directory: str | Path, settings: Mapping[str, Any], fresh: bool = False
    ) -> None:
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        self.path, settings_path = root / FILE, root / SETTINGS
        if fresh:
            self.path.unlink(missing_ok=True)
            settings_path.unlink(missing_ok=True)
        if self.path.exists():
            _check_settings(settings_path, settings)
            _cut_truncated_line(self.path)
        self._on_disk = read_samples(self.path) if self.path.exists() else []
        settings_path.write_text(
            json.dumps(dict(settings), indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )
        self._file: IO[str] = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def finished(self, benchmark: str) -> dict[tuple[str, int], Sample]:
        """Return the samples of a benchmark that were on disk, by prompt id and repeat."""
        return {(s.prompt_id, s.repeat): s for s in self._on_disk if s.benchmark == benchmark}

    def add(self, sample: Sample) -> None:
        self._file.write(sample_line(sample))
        self._file.flush()

    def __enter__(self) -> SampleLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def check_samples(
    directory: Path, settings: Mapping[str, Any], wanted: Collection[tuple[str, str]], repeats: int
) -> None:
    """Raise :class:`UserError` where ``directory`` has samples of other settings, or such as this
    evaluation, of the (benchmark, prompt id) in ``wanted``, does not ask for and would drop.
    """
    if not (directory / FILE).exists():
        return
    _check_settings(directory / SETTINGS, settings)
    before = read_samples(directory / FILE, allow_truncated=True)
    if dropped := sum(
        (s.benchmark, s.prompt_id) not in wanted or s.repeat >= repeats for s in before
    ):
        raise UserError(
            f"{directory} holds {len(before)} samples, {dropped} of which this evaluation does "
            "not ask for; give another "
            "--out, or --fresh to drop them"
        )


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = read_json_object(path)
    except UserError:
        raise UserError(
            f"{path.parent} holds samples of unknown settings; give another --out, or --fresh"
        ) from None
    for name in sorted({*before, *settings}):
        if before.get(name) != settings.get(name):
            raise UserError(
                f"{path.parent} was begun with {name} = {before.get(name)!r}, now it is "
                f"{settings.get(name)!r}; "
                "give another --out, or --fresh to drop its samples"
            )


def _cut_truncated_line(path: Path) -> None:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
