"""From a file or a hub name to prompts.

    file --read_rows--> raw rows --RowReader--> SchemaRow --to_record--> Record (problem, answer)
    --render_prompts--> Prompt (tokens, unique id)

A row with tests instead of an answer is a programming problem (``code_problems.py``), one with
options or with aliases of its answer a question.

Whatever is dropped on the way (no answer, too long) is counted and logged, and what cannot be read
is a ``UserError`` that names the line or the column.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.data import prompts
from megatron_dcpo.data.answer_keys import (
    answer_of,
    final_answer,
    has_aliases,
    is_no_answer,
    outcome_of,
    parsed,
    tests_in,
)
from megatron_dcpo.data.chat_template import ChatSwitches
from megatron_dcpo.data.chats import Messages, is_empty
from megatron_dcpo.data.labels import as_kind, labels_of, with_epoch
from megatron_dcpo.data.question_options import LETTERS, Options, options_of, right_option
from megatron_dcpo.data.row_files import ROW_SUFFIXES, Row, read_rows
from megatron_dcpo.data.row_prompts import is_text, listed_tools, problem_messages, surrounded
from megatron_dcpo.data.row_reader import (
    KNOWN,
    PLAIN,
    PROBLEMS,
    ReadRow,
    RowOptions,
    RowReader,
    what_there_is,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.brought import is_gym, name_of_task
from megatron_dcpo.runtime.plugins import load_part
from megatron_dcpo.types import CONFIDENCE_TAG, Prompt, SchemaRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PACKED_PROBLEM = "megatron_dcpo.data.code_problems:packed_problem"
_GYM_ROWS = "megatron_dcpo.data.gym_tasks:gym_rows"
_GYM_ROW = "megatron_dcpo.data.gym_tasks:problem_of"
_GENERIC_STEMS = {"train", "test", "validation", "val", "dev", "data"}
# what names the parts of a data set: -00000-of-00003, or the rest of a pattern
_PART = re.compile(r"-\d{5}-of-\d{5}(?:-[0-9a-f]{6,64})?\Z|[-_.]*[*?\[].*\Z")


@dataclass(frozen=True)
class Record:
    """One problem of a data set. ``index`` is its row in the file, counted before anything was
    dropped.

    A programming problem has packed ``tests``, and ``answer`` is their key
    (``code_problems.tests_key``). ``kind``: what the row says of its problem in one of
    ``KIND_COLUMNS``; ``labels``: :func:`labels_of` the row. ``row``: its columns, where they are
    kept; else what the verifiers of a question read. ``form`` of the answer: a key of
    ``prompts.ASKS``. ``tools`` are what the chat template lists.
    """

    task: str
    index: int
    messages: Messages
    answer: str
    tests: bytes | None = None
    kind: str | None = None
    row: Row | None = None
    form: str = "math"
    labels: Mapping[str, str] | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def problem(self) -> str:
        """Return the problem text without the reference's confidence request."""
        return prompts.bare_problem(self.messages[-1]["content"])

    @property
    def prompt_id(self) -> str:
        return f"{self.task}/{self.index}"


class NoAnswer(Exception):
    """The answer key of a row (the argument) means "no answer"."""


class Untested(Exception):
    """The tests of a row (the argument is its name) pass for any program."""


# ------------------------------------------------------------------------------------------ prompts


@dataclass(frozen=True)
class PromptOptions:
    """How problems become prompts.

    Prompts of more than ``max_prompt_length`` tokens are dropped, and ``limit`` keeps the first
    ones that are left (None or 0: all). The ``paper`` template asks for a confidence line that
    begins with ``marker``. ``thinking`` is off, on or auto (``data.thinking``). ``date`` is the one
    that a chat template writes, None for today's.
    """

    template: str = "paper"
    max_prompt_length: int | None = None
    limit: int | None = None
    marker: str = CONFIDENCE_TAG
    thinking: str = "off"
    date: datetime.date | None = None


def load_prompts(
    path_or_name: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions | None = None,
    *,
    task: str | None = None,
    keep_columns: bool = False,
    reading: RowOptions = PLAIN,
) -> list[Prompt]:
    """Return the prompts of a data set, rendered and tokenized, each with its own id (equal
    problems stay separate groups).

    ``path_or_name`` is a file, a directory with one data file, a hub name
    ``owner/name[:config][@split]``, or a task of Reasoning Gym. ``task``,
    ``keep_columns`` and ``reading`` as in :func:`load_records`.
    """
    records = load_records(path_or_name, task, keep_columns, reading)
    return render_prompts(records, tokenizer, options, source=str(path_or_name))


def render_prompts(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    options: PromptOptions | None = None,
    source: str = "the data set",
) -> list[Prompt]:
    """Render records through the prompt template. Stops reading at ``options.limit`` prompts;
    messages name the ``source``.
    """
    options = options or PromptOptions()
    longest = options.max_prompt_length
    kept: list[Prompt] = []
    too_long = 0
    for record in records:
        if options.limit and len(kept) >= options.limit:
            break
        with _naming_row(source, record):
            messages = prompts.ask(record.messages, options.template, options.marker, record.form)
            switches = ChatSwitches(options.thinking, options.date, record.tools)
            ids = prompts.encode(tokenizer, messages, options.template, switches)
        if longest is not None and len(ids) > longest:
            too_long += 1
            continue
        kept.append(_prompt(record, messages, tuple(ids)))
    if too_long:
        logger.warning("%s: dropped %d prompts longer than %d tokens", source, too_long, longest)
    if records and not kept:
        raise UserError(f"{source}: every prompt is longer than {longest} tokens; raise the limit")
    return kept


def message_prompts(
    records: Sequence[Record],
    template: str = "paper",
    limit: int | None = None,
    marker: str = CONFIDENCE_TAG,
) -> list[Prompt]:
    """Return the same prompts for a server, which has its own tokenizer and chat template:
    messages, no token ids.
    """
    asked = []
    for record in records[: limit or None]:
        with _naming_row(record.task, record):
            if record.tools:
                raise prompts.PromptError(
                    "the row has tools, which are not sent to an endpoint; evaluate the model "
                    "itself, or remove the column tools"
                )
            messages = prompts.ask(record.messages, template, marker, record.form)
        asked.append(_prompt(record, messages, ()))
    return asked


@contextmanager
def _naming_row(source: str, record: Record) -> Iterator[None]:
    """Say in a :class:`prompts.PromptError` which row it is."""
    try:
        yield
    except prompts.PromptError as error:
        raise UserError(f"{source}: row {record.index + 1}: {error}") from error


def _prompt(record: Record, messages: Messages, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        prompt_id=record.prompt_id,
        messages=messages,
        token_ids=token_ids,
        ground_truth=record.answer,
        task=record.task,
        tests=record.tests,
        row=record.row,
        form=record.form,
        problem=record.problem,
        kind=record.kind,
        labels=record.labels,
    )


def draw_prompts(
    prompts: Sequence[Prompt],
    first: int,
    count: int,
    *,
    seed: int,
    shuffle: bool,
    ranks: np.ndarray | None = None,
) -> list[Prompt]:
    """Return ``count`` prompts from the ``first`` (0-based) on: epoch after epoch, each in its own
    order when ``shuffle``; sorted by ``ranks`` where there are any, then only equal ones are
    shuffled.

    A function of seed and position alone, so that resuming needs no generator. The epoch is
    appended to ``prompt_id`` (:func:`with_epoch`), so that a prompt met twice in one step forms two
    groups.
    """
    chosen = []
    for epoch, index in in_epochs(
        len(prompts), first, count, seed=seed, shuffle=shuffle, ranks=ranks
    ):
        prompt = prompts[index]
        chosen.append(replace(prompt, prompt_id=with_epoch(prompt.prompt_id, epoch)))
    return chosen


def in_epochs(
    n: int, first: int, count: int, *, seed: int, shuffle: bool, ranks: np.ndarray | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (epoch, index) of ``count`` of ``n`` items from the ``first`` (0-based) on, in the
    order of :func:`draw_prompts`.
    """
    order, ordered = np.arange(0), -1
    for position in range(first, first + count):
        epoch, place = divmod(position, n)
        if epoch != ordered:
            order = _order(n, epoch, seed) if shuffle else np.arange(n)
            if ranks is not None:
                order = order[np.argsort(ranks[order], kind="stable")]
            ordered = epoch
        yield epoch, int(order[place])


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a short name for these prompts in this order: equal when a resumed run would train on
    the same.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(
            repr((prompt.prompt_id, list(map(int, prompt.token_ids)), prompt.ground_truth)).encode()
        )
    return digest.hexdigest()[:16]


@lru_cache(maxsize=16)  # of the sources of a mixture
def _order(n: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


# ------------------------------------------------------------------------------------------ records


def load_records(
    path_or_name: str | Path,
    task: str | None = None,
    keep_columns: bool = False,
    reading: RowOptions = PLAIN,
) -> list[Record]:
    """Return all problems with an answer. ``task`` names them, by default the row's ``data_source``
    or the file's name. ``keep_columns`` keeps all columns of each row for a user's verifier, which
    may do without an answer. ``reading`` says how a row is read.
    """
    rows: Iterable[Row]
    if is_gym(path_or_name):
        rows, keep_columns = load_part(_GYM_ROWS)(str(path_or_name)), True
        reading = RowOptions(row=_GYM_ROW)
    else:
        rows = read_rows(path_or_name)
    loading = Loading(
        task=task or task_name(path_or_name),
        forced=task is not None,
        source=str(path_or_name),
        keep_columns=keep_columns,
        reading=reading,
    )
    usable = usable_rows(enumerate(rows), loading)
    for what, count in usable.dropped.items():
        logger.warning("%s: dropped %d rows %s", path_or_name, count, what)
    if usable.untested:
        logger.warning("%s: %s", path_or_name, untested_note(usable.untested))
    if not usable.records:
        raise UserError(f"{path_or_name}: no problem with an answer in it")
    return usable.records


@dataclass(frozen=True)
class Loading:
    """How the rows of a ``source`` become problems of a ``task``, whose name is that of the row's
    ``data_source`` unless it is ``forced``.
    """

    task: str
    source: str
    forced: bool = True
    keep_columns: bool = False
    reading: RowOptions = PLAIN

    @property
    def keeps(self) -> bool:
        """Return whether the problems keep their columns, for a verifier or for an order."""
        return self.keep_columns or bool(self.reading.order)


@dataclass(frozen=True)
class UsableRows:
    """The problems among rows, the names of those whose tests any program passes, and how many rows
    were ``dropped`` for which other reason.
    """

    records: list[Record]
    untested: list[str]
    dropped: Counter[str]


def usable_rows(rows: Iterable[tuple[int, Row]], loading: Loading) -> UsableRows:
    """Return the problems among numbered rows, and log what was read of them."""
    usable = UsableRows([], [], Counter())
    reader = RowReader(loading.source, loading.reading, PROBLEMS, kept=loading.keep_columns)
    for index, raw in rows:
        read = reader.read(raw, index + 1)
        if read is None:
            continue
        try:
            record = to_record(read, index, loading, reader)
        except Untested as name:
            usable.untested.append(str(name))
        except NoAnswer as key:
            usable.dropped[f"with the key {str(key)!r:.40}, which no answer equals"] += 1
        else:
            if record is None:
                usable.dropped["without an answer"] += 1
            else:
                usable.records.append(record)
    reader.report()
    return usable


def to_record(read: ReadRow, index: int, loading: Loading, reader: RowReader) -> Record | None:
    """Return a row as a problem with its answer; None if the answer is null or empty, unless the
    columns are kept.

    Raises :class:`UserError` for a row that cannot be read, :class:`Untested` and
    :class:`NoAnswer`.
    """
    row = read.row
    where = f"{loading.source}: row {index + 1}"
    name = loading.task if loading.forced else str(row.data_source or loading.task)
    if not {"problem", "messages"} & read.has:
        raise _without(read, where, "problem")
    is_aime = "aime" in name.lower() or "aime_number" in read.columns
    key = _key_of(read, where, is_aime, keeps=loading.keeps)
    if key is None:
        return None
    chat = problem_messages(row, where, partial(reader.unread_key, number=index + 1))
    text = chat[-1]["content"]
    packed = None
    if key.tests is not None:
        code = load_part(_PACKED_PROBLEM)(text, key.tests, where)
        if code is None:
            raise Untested(str(read.columns.get("task_id") or where))
        text, packed = code.statement, code.tests
        key = replace(key, answer=code.key, given=code.key)
    elif key.form != "math":
        text = text.strip()
    stated = (*chat[:-1], {**chat[-1], "content": text})
    messages = surrounded(stated, row, key.options, where)
    columns = key.columns
    # the column of the key says nothing of the problem
    keys = {loading.reading.columns.get(name) for name in ("answer", "outcome")}
    about = {name: value for name, value in read.columns.items() if name not in keys}
    if loading.keeps:
        columns = {
            "data_source": name,
            **_with_chat(read.columns, row, chat),
            "problem": prompts.bare_problem(messages[-1]["content"]),
            "answer": key.given,
            **(key.columns or {}),
        }
    return Record(
        task=name,
        index=index,
        messages=messages,
        answer=key.answer,
        tests=packed,
        kind=as_kind(row.kind),
        row=columns,
        form=key.form,
        labels=labels_of(about),
        tools=listed_tools(row, messages, where),
    )


@dataclass(frozen=True)
class _Key:
    """What a response is judged by: the ``answer`` as text, or ``tests``. ``form`` is a key of
    ``prompts.ASKS``, ``columns`` are what the verifiers of questions read, and ``given`` is the
    answer that a verifier of the user's gets.
    """

    answer: str = ""
    form: str = "math"
    given: object = None
    columns: Row | None = None
    options: Options | None = None
    tests: object = None


def _key_of(read: ReadRow, where: str, is_aime: bool, keeps: bool) -> _Key | None:
    """Return the key of a row, None if it has no answer. ``keeps``: a verifier of the user's may
    know what the key and the options are.
    """
    row = read.row
    tests = tests_in(row.answer) if is_empty(row.tests) else row.tests
    if tests is not None:
        return _Key(tests=tests, form="code")
    if is_empty(row.answer) and "outcome" in read.has:
        forecast = _forecast_of(row, where, strict=not keeps)
        if forecast is not None or not keeps:
            return forecast
    if "answer" not in read.has and not keeps:
        raise _without(read, where, "answer")
    choice = _choice_of(row, where, strict=not keeps)
    if choice is not None:
        return choice
    if row.form not in (None, "math", "short"):
        raise UserError(f"{where}: form is math or short, not {row.form!r:.40}")
    value = parsed(row.answer)
    is_object = has_aliases(row.answer) if keeps else isinstance(value, Mapping)
    if row.form == "short" or is_object:
        found = answer_of(value, where)
        if not found.texts:
            raise UserError(f"{where}: the answer has no text and no alias that is one")
        return _Key(found.texts[0], "short", columns={"answer": value})
    return _kept_key(row.answer, is_aime) if keeps else _key_of_answer(row.answer, where, is_aime)


def _forecast_of(row: SchemaRow, where: str, strict: bool) -> _Key | None:
    """Return the key of a forecast, None for one whose outcome is empty. An outcome that is not
    understood is refused if ``strict``.
    """
    if is_empty(row.outcome):
        return None
    try:
        return _Key(outcome_of(row.outcome, where), form="forecast")
    except UserError:
        if strict:
            raise
        return None


def _choice_of(row: SchemaRow, where: str, strict: bool) -> _Key | None:
    """Return the key of a question with options, None for another row. Options that are not
    understood are refused if ``strict``.
    """
    try:
        options = options_of(row.options, where)
        if options is None:
            return None
        letter = LETTERS[right_option(row.answer, options, where)]
    except UserError:
        if strict:
            raise
        return None
    columns = {"answer": letter, "options": options.texts}
    return _Key(letter, "choice", columns=columns, options=options)


def _key_of_answer(raw: object, where: str, is_aime: bool) -> _Key | None:
    """Return the key in an answer, None if there is none."""
    found = answer_of(raw, where)
    if not found.texts:
        return None
    answers = [final_answer(text, integer=is_aime) for text in found.texts]
    if all(map(is_no_answer, answers)):
        raise NoAnswer(answers[0])
    columns = None if found.column is None else {"answer": found.column}
    return _Key(answers[0], columns=columns)


def _kept_key(raw: object, is_aime: bool) -> _Key:
    """Return the key of a row whose columns are kept: what the row has, and its text."""
    if isinstance(raw, list | tuple | Mapping):
        return _Key(json.dumps(raw, default=str, ensure_ascii=False), given=raw)
    text = final_answer(raw, integer=is_aime)
    return _Key(text, given=text if isinstance(raw, str) else raw)


def _with_chat(columns: Row, row: SchemaRow, chat: Messages) -> Row:
    """Return the columns with the chat that is the problem as a list of messages."""
    problem = row.messages if is_empty(row.problem) else row.problem
    if is_text(problem):
        return columns
    named = (name for name in KNOWN["problem"] if columns.get(name) is problem)
    return {**columns, next(named, "prompt"): list(chat)}


def _without(read: ReadRow, where: str, missing: str) -> UserError:
    """Return the error of a row without a problem or an answer."""
    others = KNOWN["messages"] if missing == "problem" else ("tests", "outcome")
    known = [*KNOWN[missing], *others]
    return UserError(
        f"{where} has no {missing}; {what_there_is(read.columns)}; expected one of "
        f"{', '.join(known)}; name yours, data.columns={{{missing}: NAME}}, or read the rows by a "
        "function, data.row (dcpo evaluate takes both too, or --as-trained CONFIG)"
    )


def untested_note(names: Sequence[str]) -> str:
    """Return what to say about programming problems whose tests assert nothing."""
    return f"left out {len(names)} tasks whose tests assert nothing: {', '.join(names)}"


def task_name(path_or_name: str | Path) -> str:
    """Return a task's name: ``.../math500/test.jsonl`` -> math500; ``.../aime24.parquet`` ->
    aime24; ``.../mine/train-*.parquet`` -> mine; ``owner/name@test`` -> name;
    ``reasoning_gym:chain_sum`` -> chain_sum.
    """
    if is_gym(path_or_name):
        return name_of_task(str(path_or_name))
    path = Path(str(path_or_name).partition("@")[0].partition(":")[0])
    stem = path.name.removesuffix(".gz")
    stem = stem.rsplit(".", 1)[0] if stem.endswith(ROW_SUFFIXES) else stem
    stem = _PART.sub("", stem) or "data"
    return path.parent.name if stem in _GENERIC_STEMS and path.parent.name else stem
