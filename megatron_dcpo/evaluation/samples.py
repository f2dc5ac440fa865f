"""The sample of an evaluation, one line of ``samples.jsonl``: a judged response and its measures.

``SampleLog`` holds the samples of an evaluation in progress: each is on disk as soon as it is
judged, and none is sampled twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any

import numpy as np

from megatron_dcpo import codec
from megatron_dcpo.calibration.summary import json_ready
from megatron_dcpo.data.labels import without_epoch
from megatron_dcpo.data.row_files import read_json_lines
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.run_records import differing, parse_date
from megatron_dcpo.runtime.text import read_json_object
from megatron_dcpo.types import (
    ConfidenceStatus,
    Count,
    Judgement,
    Limits,
    Probability,
    Prompt,
    Response,
)

logger = logging.getLogger(__name__)

# rounding in an engine can lift a log-prob of 0 slightly above 0
LogProbability = Annotated[float, Limits(-math.inf, 1e-3)]


@dataclass(frozen=True)
class Measures:
    """The values that an evaluation derives from a response: all kinds of confidence except the
    stated one, and the inputs of post-hoc predictors. None means not known.

    ``token_confidence`` is exp(mean log p), the geometric mean over all sampled tokens, EOS
    included, of the raw logits (no temperature). ``min_logprob`` (nats) is the log-prob of the
    least likely token. ``mean_entropy`` (nats) is the mean over tokens of the entropy of the
    engine's largest log-probs, with the rest of the mass as one more token; it is a lower bound.
    ``reasoning_logprob`` (nats) is the sum over the reasoning block. ``consistency_confidence`` is
    the share of the problem's repeats whose answer is equivalent to this one, None without an
    answer. ``features`` are the inputs of ConfClass (``posthoc.features``), and
    ``posthoc_confidence`` is the output of a predictor, and ``posthoc_by`` its method.
    """

    token_confidence: Probability | None = None
    min_logprob: LogProbability | None = None
    mean_entropy: Annotated[float, Limits(-1e-3, math.inf)] | None = None
    reasoning_logprob: Annotated[float, Limits(-math.inf, 0)] | None = None
    consistency_confidence: Probability | None = None
    features: list[float] | None = None
    posthoc_confidence: Probability | None = None
    posthoc_by: str | None = None


@dataclass(frozen=True)
class Origin:
    """What a sample was made of, as short digests: ``asked`` of the prompt as it was sent,
    ``judged_by`` of the key, the columns and the verifier (:func:`digest_asked`,
    :func:`digest_judged`). None is not known: in logs of others, and where a verifier has no
    digest. ``training_step`` is the step that trained on the response, None in an evaluation.
    """

    asked: str | None = None
    judged_by: str | None = None
    training_step: Count | None = None


@dataclass(frozen=True)
class Sample:
    """One response to one problem of a benchmark, judged and measured; ``prompt.task`` is the
    benchmark, ``response.sample_index`` the repeat.

    Prompt and response are as they are read from a file, so their tokens are not kept
    (:func:`codec.as_read`).
    """

    prompt: Prompt
    response: Response
    judgement: Judgement
    measures: Measures = Measures()
    origin: Origin = Origin()

    @property
    def problem_key(self) -> tuple[str, str]:
        """Return benchmark and prompt id, which together name the problem; the id of a response
        that was trained on is without the epoch, so that a problem met in two epochs is one.
        """
        prompt_id = self.prompt.prompt_id
        if self.origin.training_step is not None:
            prompt_id = without_epoch(prompt_id)
        return self.prompt.task, prompt_id

    @property
    def name(self) -> str:
        """Return the name of the response, unlike that of any other response in its file."""
        parts = (self.prompt.task, self.prompt.prompt_id, str(self.response.sample_index))
        return "/".join(parts)

    @property
    def correct(self) -> bool:
        """Return whether the answer is right: the judgement's correctness is 0 or 1."""
        return self.judgement.correct == 1

    @property
    def is_code(self) -> bool:
        """Return whether the ground truth is the key of its tests."""
        return self.prompt.ground_truth.startswith("tests:")

    @property
    def turn(self) -> int:
        """Return the number of the turn of an agent's last answer, 1 without an agent."""
        return int((self.response.counted or {}).get("turns", 1))

    def at_turn(self, turn: int, confidence: float | None) -> Sample:
        """Return the sample with what was stated when the policy was asked at a turn, as if that
        were the last one; its measures are those of another text.
        """
        status: ConfidenceStatus = "unparsable" if confidence is None else "ok"
        return replace(
            self,
            response=replace(
                self.response,
                turn_confidences=(),
                counted={**(self.response.counted or {}), "turns": float(turn)},
            ),
            judgement=replace(self.judgement, confidence=confidence, status=status),
            measures=Measures(),
        )

    def measured(self, **values: object) -> Sample:
        """Return a copy with other values of its measures."""
        return replace(self, measures=replace(self.measures, **values))  # type: ignore[arg-type]


def with_consistency(
    samples: Sequence[Sample], equivalent: Callable[[str, str], bool]
) -> list[Sample]:
    """Return the samples with ``consistency_confidence``: the agreement among the repeats of a
    problem, the sample itself included.

    ``equivalent(a, b)`` decides whether two answers are the same; equal strings are never asked
    about. A new answer joins the first class whose representative it is equivalent to.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.problem_key, []).append(index)
    result = list(samples)
    for members in groups.values():
        answers = [samples[index].judgement.answer for index in members]
        classes = answer_classes(answers, equivalent)
        for index, answer_class in zip(members, classes, strict=True):
            agreement = None
            if answer_class is not None:
                agreement = classes.count(answer_class) / len(members)
            result[index] = samples[index].measured(consistency_confidence=agreement)
    return result


def answer_classes(
    answers: Sequence[str | None], equivalent: Callable[[str, str], bool]
) -> list[str | None]:
    """Return, for every answer, the representative of its class; None without an answer."""
    representative: dict[str, str] = {}
    for answer in answers:
        if answer is None or answer in representative:
            continue
        chosen = answer
        for other in dict.fromkeys(representative.values()):
            if equivalent(answer, other):
                chosen = other
                break
        representative[answer] = chosen
    return [None if answer is None else representative[answer] for answer in answers]


def at_each_turn(samples: Iterable[Sample]) -> list[Sample]:
    """Return a sample for each confidence that was stated in the sessions of agents, with the
    verdict and the problem of its session: those behind earlier answers, and the last.
    """
    rows = []
    for sample in samples:
        rows += [sample.at_turn(*stated) for stated in sample.response.turn_confidences]
        rows.append(sample.at_turn(sample.turn, sample.judgement.confidence))
    return rows


def write_samples(samples: Iterable[Sample], path: str | Path) -> None:
    """Write a file of samples atomically: an older file stays until the new one is complete."""
    write_atomically(Path(path), "".join(map(sample_line, samples)))


def sample_line(sample: Sample) -> str:
    """Return a sample as one line of ``samples.jsonl``."""
    row = codec.to_row(
        sample.prompt, sample.response, sample.judgement, sample.measures, sample.origin
    )
    return json.dumps(json_ready(row), ensure_ascii=False) + "\n"


def read_samples(path: str | Path, allow_truncated: bool = False) -> list[Sample]:
    """Return the samples in a file; unknown keys are ignored.

    ``allow_truncated`` leaves out a broken last line, which a killed evaluation leaves behind.
    Raises :class:`UserError`, which names file and line, for anything else that is not a sample.
    """
    samples = []
    for where, row in read_json_lines(path, allow_truncated):
        try:
            codec.check_version(row)
            samples.append(sample_of(row))
        except ValueError as error:
            raise UserError(f"{where}: not a sample of dcpo evaluate ({error})") from None
    return samples


def sample_of(row: Mapping[str, object]) -> Sample:
    """Return the sample in a row of the codec. Raises ValueError."""
    return Sample(
        prompt=codec.from_row(Prompt, row),
        response=codec.from_row(Response, row),
        judgement=codec.from_row(Judgement, row),
        measures=codec.from_row(Measures, row),
        origin=codec.from_row(Origin, row),
    )


def mean_entropy(top_logprobs: np.ndarray | None) -> float | None:
    """Return the mean over tokens of -sum p log p in nats, where the sum runs over the K largest
    log-probs [T, K] and the remaining mass.
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
    if not len(logprobs):
        return None
    return min(1.0, math.exp(math.fsum(logprobs) / len(logprobs)))


# ------------------------------------------------------------------- samples that fit an evaluation


def digest_asked(prompt: Prompt) -> str:
    """Return a short digest of a prompt as it is sent: its messages and its tokens."""
    sent = [list(prompt.messages), list(map(int, prompt.token_ids))]
    return _digest(sent)


def digest_judged(prompt: Prompt, verifier: str) -> str | None:
    """Return a short digest of what a response to a prompt is judged by: key, columns, form of the
    answer, and the digest of the ``verifier``; None if that is not known.
    """
    if not verifier:
        return None
    return _digest([prompt.ground_truth, prompt.row, prompt.form, verifier])


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_prompt(sample: Sample, prompt: Prompt) -> Sample:
    """Return a sample under the id of ``prompt``, with its key and columns."""
    return replace(
        sample,
        prompt=codec.as_read(prompt),
        response=replace(sample.response, prompt_id=prompt.prompt_id),
        judgement=replace(sample.judgement, prompt_id=prompt.prompt_id),
    )


def matched(
    samples: Sequence[Sample], prompts: Sequence[Prompt]
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples that are responses to one of the prompts, and the others.

    A problem that has moved in its file keeps its samples, under its new id. Of two samples with
    one key the last counts. Refused prompts have no samples.
    """
    last: dict[tuple[str, str, int], Sample] = {}
    for sample in samples:
        if sample.response.refusal is None:
            last[(*sample.problem_key, sample.response.sample_index)] = sample
    by_key = {(prompt.task, prompt.prompt_id): prompt for prompt in prompts}
    prompt_digests = {key: digest_asked(prompt) for key, prompt in by_key.items()}
    kept: dict[tuple[str, str, int], Sample] = {}
    unmatched: dict[tuple[str, str | None, int], list[Sample]] = {}
    for key, sample in last.items():
        task, prompt_id, repeat = key
        prompt = by_key.get((task, prompt_id))
        if prompt is not None and sample.origin.asked == prompt_digests[task, prompt_id]:
            kept[key] = sample
        else:
            moved_key = (task, sample.origin.asked, repeat)
            unmatched.setdefault(moved_key, []).append(sample)
    repeats = sorted({repeat for _, _, repeat in last})
    for (task, prompt_id), prompt in by_key.items():
        for repeat in repeats:
            moved = unmatched.get((task, prompt_digests[task, prompt_id], repeat))
            if moved and (task, prompt_id, repeat) not in kept:
                kept[task, prompt_id, repeat] = with_prompt(moved.pop(0), prompt)
    others = [sample for left in unmatched.values() for sample in left]
    return list(kept.values()), others


FILE = "samples.jsonl"
REPLACED = "samples.replaced.jsonl"  # of problems that are other ones now
SETTINGS = "settings.json"
# A setting that continues instead of being compared: the date that the chat template writes.
DATE = "date"


def settings_next_to(samples: str | Path) -> dict[str, Any] | None:
    """Return how the samples of a file were drawn, from the settings in its directory; None if
    there are none. Raises :class:`UserError` if they cannot be read.
    """
    path = Path(samples).with_name(SETTINGS)
    return read_json_object(path) if path.is_file() else None


class SampleLog:
    """``samples.jsonl`` of a run directory, appended to line by line, next to its
    ``settings.json``.

    A directory that holds samples drawn with other settings is refused, since they must not be
    mixed. A last line that a killed process left unfinished is cut off; its sample is drawn again.
    :meth:`match` sets the samples of other problems aside.
    """

    def __init__(
        self, directory: str | Path, settings: Mapping[str, Any], fresh: bool = False
    ) -> None:
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        self.path = root / FILE
        settings_path = root / SETTINGS
        if fresh:
            self.path.unlink(missing_ok=True)
            settings_path.unlink(missing_ok=True)
        if self.path.exists():
            _check_settings(settings_path, settings)
            _cut_truncated_line(self.path)
        self._on_disk = read_samples(self.path) if self.path.exists() else []
        text = json.dumps(dict(settings), indent=1, sort_keys=True) + "\n"
        write_atomically(settings_path, text)
        self._file: IO[str] = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def match(self, prompts: Sequence[Prompt]) -> None:
        """Keep the samples of these prompts, all that the evaluation asks. The others move to
        ``REPLACED``, which only grows, and a line says so.
        """
        kept, others = matched(self._on_disk, prompts)
        same = zip(kept, self._on_disk, strict=False)
        if len(kept) == len(self._on_disk) and all(one is other for one, other in same):
            return
        if others:
            replaced = self.path.with_name(REPLACED)
            with open(replaced, "a", encoding="utf-8") as file:
                file.writelines(map(sample_line, others))
            names = sorted({sample.prompt.prompt_id for sample in others})
            logger.warning(
                "%d samples are of other problems than those of this evaluation (%s); they are in "
                "%s, and these problems are sampled again",
                len(others),
                shortened(names),
                replaced,
            )
        self._file.close()
        write_samples(kept, self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._on_disk = kept

    def finished(self, benchmark: str) -> dict[tuple[str, int], Sample]:
        """Return a benchmark's samples that were on disk at the start, by prompt id and repeat."""
        return {s.response.key: s for s in self._on_disk if s.prompt.task == benchmark}

    def add(self, sample: Sample) -> None:
        try:
            self._file.write(sample_line(sample))
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)
            raise

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
    """Raise :class:`UserError` if ``directory`` has samples drawn with other settings, or samples
    that an evaluation of the (benchmark, prompt id) in ``wanted`` does not ask for and would drop.
    """
    if not (directory / FILE).exists():
        return
    _check_settings(directory / SETTINGS, settings)
    before = read_samples(directory / FILE, allow_truncated=True)
    dropped = 0
    for sample in before:
        if sample.problem_key not in wanted or sample.response.sample_index >= repeats:
            dropped += 1
    if dropped:
        raise UserError(
            f"{directory} holds {len(before)} samples, {dropped} of which this evaluation does "
            "not ask for; give another --out, or --fresh to drop them"
        )


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        before = read_json_object(path)
    except UserError:
        raise UserError(
            f"{path.parent} holds samples of unknown settings; give another --out, or --fresh"
        ) from None
    for name, (old, new) in differing(before, settings):
        if name != DATE:
            raise UserError(
                f"{path.parent} was begun with {name} = {old!r}, now it is {new!r}; give another "
                "--out, or --fresh to drop its samples"
            )


def date_of(directory: str | Path) -> date | None:
    """Return the date with which the samples in a directory were drawn, None if there are none."""
    root = Path(directory)
    if not (root / FILE).exists():
        return None
    with suppress(UserError):
        return parse_date(read_json_object(root / SETTINGS).get(DATE))
    return None


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Return the first names of a list, and how many there are besides."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _cut_truncated_line(path: Path) -> None:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
