"""The benchmarks, one entry each: the location of the data, the number of problems, and the known
defects.

A benchmark is searched for as a file below the data directory (the argument, or ``DCPO_DATA``, or
``data/``), then on the hub. Any other data file can be a benchmark too: ``NAME=PATH``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType

from megatron_dcpo.data.datasets import (
    Loading,
    Record,
    load_records,
    task_name,
    untested_note,
    usable_rows,
)
from megatron_dcpo.data.gym_tasks import HELD_OUT_SEED, gym_path
from megatron_dcpo.data.livecodebench import contest_date
from megatron_dcpo.data.row_files import SUFFIXES, Row, read_rows
from megatron_dcpo.data.row_reader import PLAIN, RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.brought import is_gym, name_of_task
from megatron_dcpo.sandbox.tests import LIVECODEBENCH_COMMIT


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. Its ``files`` are tried in order below the data directory; ``hub`` is
    ``owner/name[:config]@split``.

    ``count`` is the official number of problems. ``notes`` are warnings about a public copy, by
    file name, or "" for every source. ``parts`` are files that together make up the set; those that
    exist are read. ``window`` holds the first day of the contests and the day after the last.
    """

    name: str
    title: str
    files: tuple[str, ...]
    hub: str
    count: int
    notes: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    window: tuple[str, str] | None = None


@dataclass(frozen=True)
class LoadedBenchmark:
    """The problems of a benchmark, their source, and warnings about differences from the official
    set.
    """

    name: str
    source: str
    records: tuple[Record, ...]
    warnings: tuple[str, ...]

    @property
    def is_gym(self) -> bool:
        """Return whether the problems are Reasoning Gym's, which brings its scorers."""
        return is_gym(self.source)


_FIND_ZERO = (
    "problem 32: the published test swaps two arguments and rejects every program; corrected"
)

_ENTRIES = (
    Benchmark(
        name="math500",
        title="MATH-500",
        files=("math500/test.jsonl", "MATH-500/test.jsonl", "math500.jsonl"),
        hub="HuggingFaceH4/MATH-500@test",
        count=500,
    ),
    Benchmark(
        name="aime24",
        title="AIME 2024",
        files=("aime24/aime24.parquet", "aime24.parquet", "aime24/aime.json", "aime24.jsonl"),
        hub="HuggingFaceH4/aime_2024@train",
        count=30,
    ),
    Benchmark(
        name="aime25",
        title="AIME 2025",
        files=(
            "aime25/aime2025.jsonl",
            "aime25/aime2025.reconstructed.jsonl",
            "aime25/test.jsonl",
            "aime25/aime25.json",
            "aime25.jsonl",
        ),
        hub="math-ai/aime25@test",
        count=30,
    ),
    Benchmark(
        name="amc23",
        title="AMC 2023",
        files=("amc23/test.jsonl", "amc23.jsonl", "amc23/test.parquet"),
        hub="math-ai/amc23@test",
        count=40,
        notes={
            "": "the usual 40 problems with integer answers; the DCPO paper's copy has 46 and is "
            "not public"
        },
    ),
    Benchmark(
        name="amc24",
        title="AMC 2024",
        files=("amc24/amc24.json", "amc24/amc24.jsonl", "amc24.jsonl", "amc24.json"),
        hub="rawsh/2024_AMC12@train",
        count=45,
        notes={
            "amc24/amc24.json": "wrong keys in 12B-14, 12B-15, 12B-18, 12B-25 and garbled "
            "statements in 12B-10, 12B-11, 12B-20; 12B-4 has a letter as its key; 12A lacks 14, "
            "18, 20, 22 and 12B lacks 7, 19; the DCPO paper uses 45 problems"
        },
    ),
    Benchmark(
        name="gsm8k",
        title="GSM8K",
        files=("gsm8k/test.jsonl", "gsm8k.jsonl", "gsm8k/main/test.parquet"),
        hub="openai/gsm8k:main@test",
        count=1319,
    ),
    Benchmark(
        name="humanevalplus",
        title="HumanEval+",
        files=(
            "humanevalplus/HumanEvalPlus-OriginFmt.jsonl.gz",
            "humanevalplus/HumanEvalPlus.jsonl.gz",
            "humanevalplus/test.parquet",
            "humanevalplus.jsonl",
            "humanevalplus/HumanEvalPlus-Mini.jsonl.gz",
        ),
        hub="evalplus/humanevalplus@test",
        count=164,
        notes={
            "HumanEvalPlus-OriginFmt.jsonl.gz": _FIND_ZERO,
            "evalplus/humanevalplus@test": _FIND_ZERO,
            "HumanEvalPlus.jsonl.gz": "inputs only: expected values are what the reference "
            "solution returns",
            "HumanEvalPlus-Mini.jsonl.gz": "the reduced set of inputs, easier than HumanEval+; "
            "expected values are what the reference solution returns",
        },
    ),
    Benchmark(
        name="mbppplus",
        title="MBPP+",
        files=("mbppplus/MbppPlus-OriginFmt.jsonl.gz", "mbppplus/test.parquet", "mbppplus.jsonl"),
        hub="evalplus/mbppplus@test",
        count=378,
    ),
    Benchmark(
        name="lcbv5",
        title="LiveCodeBench v5",
        files=("livecodebench/release_v5.jsonl", "livecodebench_v5.jsonl", "lcb_v5.jsonl"),
        hub="livecodebench/code_generation_lite:release_v5@test",
        count=279,
        parts=tuple(f"livecodebench/test{part}.jsonl" for part in ("", "2", "3", "4", "5")),
        window=("2024-08-01", "2025-02-01"),
    ),
    Benchmark(
        name="lcbv6",
        title="LiveCodeBench v6",
        files=("livecodebench/release_v6.jsonl", "livecodebench_v6.jsonl", "lcb_v6.jsonl"),
        hub="livecodebench/code_generation_lite:release_v6@test",
        count=131,
        parts=("livecodebench/test6.jsonl",),
        window=("2025-02-01", "2025-05-01"),
    ),
    Benchmark(
        name="leetcode",
        title="LeetCodeDataset v0.3.1 (test)",
        files=("leetcodedataset/LeetCodeDataset-v0.3.1-test.jsonl.gz", "leetcode.jsonl"),
        hub="newfacade/LeetCodeDataset@test",
        count=228,
    ),
    Benchmark(
        name="gpqa",
        title="GPQA Diamond",
        files=(
            "gpqa/gpqa_diamond.csv",
            "gpqa_diamond.csv",
            "gpqa/gpqa_diamond.parquet",
            "gpqa/train.parquet",
        ),
        hub="Idavidrein/gpqa:gpqa_diamond@train",
        count=198,
    ),
    Benchmark(
        name="mmlupro",
        title="MMLU-Pro",
        files=("mmlupro/test.parquet", "mmlupro/test.jsonl", "mmlupro.parquet", "mmlupro.jsonl"),
        hub="TIGER-Lab/MMLU-Pro@test",
        count=12032,
    ),
    Benchmark(
        name="triviaqa",
        title="TriviaQA (unfiltered)",
        files=(
            "triviaqa/unfiltered-web-dev.json",
            "triviaqa/validation.parquet",
            "triviaqa.jsonl",
            "triviaqa.parquet",
        ),
        hub="mandarjoshi/trivia_qa:unfiltered.nocontext@validation",
        count=11313,
    ),
    Benchmark(
        name="hotpotqa",
        title="HotpotQA (closed book)",
        files=(
            "hotpotqa/hotpot_dev_fullwiki_v1.json",
            "hotpotqa/hotpot_dev_distractor_v1.json",
            "hotpotqa.jsonl",
        ),
        hub="hotpotqa/hotpot_qa:fullwiki@validation",
        count=7405,
    ),
)

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
_ALIASES = {
    "aime2024": "aime24",
    "aime2025": "aime25",
    "amc2023": "amc23",
    "amc2024": "amc24",
    "livecodebenchv5": "lcbv5",
    "livecodebenchv6": "lcbv6",
    "leetcodedataset": "leetcode",
    "gpqadiamond": "gpqa",
}
_WINDOW = re.compile(r"(\d{4}-\d{2}-\d{2})\.\.(\d{4}-\d{2}-\d{2})")


def find_benchmark(name: str) -> Benchmark:
    """Return a benchmark by its name in any spelling: MATH-500, math_500, AIME24, aime-2024."""
    key = re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "plus"))
    key = _ALIASES.get(key, key)
    if key not in BENCHMARKS and name.endswith(SUFFIXES):
        raise UserError(
            f"{name!r} is a data file and no benchmark's name; give it one, "
            f"{task_name(name)}={name}"
        )
    if key not in BENCHMARKS:
        raise UserError(
            f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}; or give NAME=PATH of a "
            "data file"
        )
    return BENCHMARKS[key]


def load_benchmark(
    spec: str,
    data_dir: str | Path | None = None,
    keep_columns: bool = False,
    reading: RowOptions = PLAIN,
) -> LoadedBenchmark:
    """Return a registered benchmark by name, ``NAME=PATH``, or a task of Reasoning Gym.

    ``keep_columns`` as in :func:`load_records`. ``reading`` is for the rows of a file at PATH; its
    columns are for those that have all of them.

    A name may be followed by another window of contest dates: ``lcbv5:2024-10-01..2025-02-01``, the
    last day left out.
    """
    if is_gym(spec):
        spec = f"{name_of(spec)}={spec}"
    name, has_path, path = spec.partition("=")
    name, _, dates = name.strip().partition(":")
    if has_path:
        if not re.fullmatch(r"[\w.-]+", name) or dates or not path:
            raise UserError(
                f"bad benchmark {spec!r}; write NAME=PATH, NAME of letters, digits and . _ -"
            )
        path = gym_path(path, {}, None, HELD_OUT_SEED) if is_gym(path) else path
        records = load_records(path, name, keep_columns, replace(reading, held_out=True))
        return LoadedBenchmark(name, path, tuple(records), ())
    entry = find_benchmark(name)
    if dates:
        entry = replace(entry, window=_parse_window(spec, dates, entry), count=0)
    sources = _find_sources(entry, data_dir)
    rows = _rows_of(entry, sources)
    try:
        usable = usable_rows(rows, Loading(entry.name, sources[0], keep_columns=keep_columns))
    except UserError as error:
        if sources != [entry.hub]:
            raise
        raise UserError(
            f"{entry.name}: no file below {_data_root(data_dir)} (set DCPO_DATA), and {error}"
        ) from None
    if not usable.records:
        raise UserError(
            f"{entry.name}: no problem of {' to '.join(entry.window or ())} in {', '.join(sources)}"
        )
    source = ", ".join(sources)
    warnings = [*_differences(entry, source, len(usable.records) + len(usable.untested))]
    if usable.untested:
        warnings.append(f"{entry.name}: {untested_note(usable.untested)}")
    return LoadedBenchmark(entry.name, source, tuple(usable.records), tuple(warnings))


def _rows_of(entry: Benchmark, sources: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """Yield the rows of the window with their numbers, each question once."""
    seen = set()
    for index, row in enumerate(_rows_in_window(entry, sources)):
        if row.get("question_id") is not None and entry.window:
            if row["question_id"] in seen:
                continue
            seen.add(row["question_id"])
        yield index, row


def _rows_in_window(entry: Benchmark, sources: Sequence[str]) -> Iterator[Row]:
    """Yield the rows whose contest is in the window of the benchmark, before they are decoded."""
    for source in sources:
        for row in read_rows(source):
            if entry.window is None:
                yield row
                continue
            first, end = entry.window
            if first <= contest_date(row) < end:
                yield row


def _parse_window(spec: str, dates: str, entry: Benchmark) -> tuple[str, str]:
    match = _WINDOW.fullmatch(dates.strip())
    if match is None or entry.window is None:
        dated = ", ".join(name for name, known in BENCHMARKS.items() if known.window)
        raise UserError(
            f"bad benchmark {spec!r}; {dated} take a window FROM..TO, such as "
            "2024-08-01..2025-02-01"
        )
    try:
        first, end = (date.fromisoformat(day) for day in match.groups())
    except ValueError as error:
        raise UserError(f"bad benchmark {spec!r}: {error}") from None
    if first >= end:
        raise UserError(f"bad benchmark {spec!r}: the window is empty")
    return first.isoformat(), end.isoformat()


def parse_specs(text: str) -> list[str]:
    """Return the parts of ``"math500, AIME24,mine=a.jsonl"``. Raises :class:`UserError` if a name
    occurs twice.
    """
    specs = [part.strip() for part in text.split(",") if part.strip()]
    if not specs:
        raise UserError(f"no benchmark named; known: {', '.join(BENCHMARKS)}")
    names = [name_of(spec) for spec in specs]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise UserError(f"benchmark named twice: {', '.join(sorted(repeated))}")
    return specs


def name_of(spec: str) -> str:
    """Return the name of a benchmark as :func:`load_benchmark` gives it. Reads no data."""
    if is_gym(spec):
        return name_of_task(spec)
    if "=" in spec:
        return spec.partition("=")[0].strip()
    return find_benchmark(spec.partition(":")[0]).name


def path_in(spec: str) -> str:
    """Return the path in a benchmark's specification, "" of a registered one."""
    if is_gym(spec):
        return spec
    return spec.partition("=")[2].strip()


def _find_sources(entry: Benchmark, data_dir: str | Path | None) -> list[str]:
    root = _data_root(data_dir)
    for file in entry.files:
        if (root / file).exists():
            return [str(root / file)]
    parts = [str(root / part) for part in entry.parts if (root / part).exists()]
    if parts:
        return parts
    if data_dir and not root.is_dir():
        raise UserError(
            f"data directory {root} does not exist; correct it, set DCPO_DATA or give "
            f"{entry.name}=PATH"
        )
    return [entry.hub]


def _data_root(data_dir: str | Path | None) -> Path:
    return Path(data_dir or os.environ.get("DCPO_DATA") or "data").expanduser()


def _differences(entry: Benchmark, source: str, count: int) -> tuple[str, ...]:
    warnings = []
    if entry.window:
        warnings.append(
            f"{entry.name}: contests from {entry.window[0]} to the day before {entry.window[1]}, "
            f"by LiveCodeBench's rule at commit {LIVECODEBENCH_COMMIT}"
        )
    if entry.count and count != entry.count:
        warnings.append(f"{entry.name}: {count} problems instead of {entry.count} ({source})")
    for file, note in entry.notes.items():
        if source.endswith(file):
            warnings.append(f"{entry.name}: {note}")
    return tuple(warnings)
