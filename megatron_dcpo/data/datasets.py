"""From a file or a hub name to prompts: JSON, JSON lines, CSV, parquet; verl-style rows or plain
problem/answer columns.

    file --read_rows--> rows --to_record--> Record (problem, answer) --load_prompts--> Prompt
    (tokens, unique id)

A row with tests instead of an answer is a programming problem (``code_problems.py`` has the
formats), one with options or with aliases of its answer a question (``questions.py``). A passage
next to a question is put before it (``passages.py``).

Whatever is dropped on the way (no answer, too long) is counted and logged, and what cannot be read
is a ``UserError`` that names the line or the column.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.data import prompts
from megatron_dcpo.data.answer_keys import answer_of, is_no_answer, is_structured, last_box
from megatron_dcpo.data.chat_template import ChatSwitches
from megatron_dcpo.data.chats import (
    CHAT_COLUMNS,
    SYSTEMS,
    ChatReader,
    Messages,
    behind_history,
    history_of,
    is_chat_text,
    is_message,
    tools_of,
    with_system,
)
from megatron_dcpo.data.columns_of_tests import (
    TEST_COLUMNS,
    OtherLanguage,
    Untested,
    may_have_tests,
)
from megatron_dcpo.data.labels import (
    ANSWER_COLUMNS,
    KIND_COLUMNS,
    PROBLEM_COLUMNS,
    kind_of_row,
    labels_of,
    with_epoch,
)
from megatron_dcpo.data.passages import (
    PASSAGE_COLUMNS,
    has_media,
    passage_of,
    passage_text,
    with_passage,
)
from megatron_dcpo.data.question_options import KEY_COLUMNS
from megatron_dcpo.data.question_rows import question_of
from megatron_dcpo.data.row_files import ROW_SUFFIXES, Row, read_rows
from megatron_dcpo.data.unread_columns import RowKeys, Unread, is_empty, shows
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.brought import is_gym, name_of_task
from megatron_dcpo.runtime.plugins import load_part
from megatron_dcpo.types import CONFIDENCE_TAG, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
_ABSENT = object()
_READ_ELSEWHERE = (
    *("Question", "Problem", "question_stem", "Correct Answer", "supporting_facts", "Answer"),
    *(f"Incorrect Answer {number}" for number in (1, 2, 3)),
    *("reward_model", "history", "tools", "options", "choices"),
    *("aime_number", "opa", "opb", "opc", "opd", "ope", *"ABCDEFGHIJ"),
)
_SOLUTIONS = (
    "solution solutions worked_solution generated_solution rationale explanation cot reasoning "
    "thinking reasoning_content response responses generations completion output "
    "expected_answer correctness_math_verify correctness_count gold_standard_solution "
    "canonical_solution llama8b_solve_rate problem_type question_type exp solution_source "
    "is_correct"
)
_OF_PROGRAMS = (
    "starter_code test entry_point prompt_id contract atol assertion public_test_cases "
    "private_test_cases contest_date platform meta_data test_setup_code challenge_test_list query "
    "estimated_date source_file test_imports in_source_id text problem_description memory_limit "
    "time_limit base_input plus_input test_list input_output completion input code"
)
KEYS = RowKeys(
    what="column",
    read=frozenset(
        {
            *(*PROBLEM_COLUMNS, *ANSWER_COLUMNS, *KIND_COLUMNS, *KEY_COLUMNS, *CHAT_COLUMNS),
            *(*SYSTEMS, *TEST_COLUMNS, *PASSAGE_COLUMNS, *map(str.upper, PASSAGE_COLUMNS)),
            *(*map(str.title, PASSAGE_COLUMNS), *_READ_ELSEWHERE),
        }
    ),
    harmless=frozenset({*_SOLUTIONS.split(), *KIND_COLUMNS}),
    refused={
        "input": "name it by data.columns={context: input}, or leave it out by {input: ''}",
        **dict.fromkeys(
            ("instruction", "instructions", "prefix", "suffix", "documents"),
            "put its text into the problem, or name its column by data.columns",
        ),
        "chat_template_kwargs": "data.thinking is the switch of the chat template",
        "functions": "give them as tools, a list of {type: function, function: ...}",
        "tools_kwargs": "tools that answer are not called here; remove it",
    },
)
# Of a row with tests: its format is known, and what else such rows have is harmless.
KEYS_OF_PROGRAMS = replace(
    KEYS,
    harmless=KEYS.harmless | frozenset(_OF_PROGRAMS.split()),
    refused={name: remedy for name, remedy in KEYS.refused.items() if name != "input"},
)
_PACKED_PROBLEM = "megatron_dcpo.data.code_problems:packed_problem"
_GYM_ROWS = "megatron_dcpo.data.gym_tasks:gym_rows"
_GENERIC_STEMS = {"train", "test", "validation", "val", "dev", "data"}
# what names the parts of a data set: -00000-of-00003, or the rest of a pattern
_PART = re.compile(r"-\d{5}-of-\d{5}(?:-[0-9a-f]{6,64})?\Z|[-_.]*[*?\[].*\Z")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True)
class Record:
    """One problem of a data set. ``index`` is its row in the file, counted before anything was
    dropped.

    A programming problem has packed ``tests``, and ``answer`` is their key
    (``code_problems.tests_key``). ``kind``: what the row says of its problem in one of
    ``KIND_COLUMNS``; ``labels``: :func:`labels_of` the row. ``row``: :func:`columns`, where they
    are asked for; else what the verifiers of a question read. ``form`` of the answer: a key of
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
    columns: Mapping[str, str] = NO_COLUMNS,
) -> list[Prompt]:
    """Return the prompts of a data set, rendered and tokenized, each with its own id (equal
    problems stay separate groups).

    ``path_or_name`` is a file, a directory with one data file, a hub name
    ``owner/name[:config][@split]``, or a task of Reasoning Gym. ``task``,
    ``keep_columns`` and ``columns`` as in :func:`load_records`.
    """
    records = load_records(path_or_name, task, keep_columns, columns)
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


@functools.lru_cache(maxsize=16)  # of the sources of a mixture
def _order(n: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


# ------------------------------------------------------------------------------------------ records


def load_records(
    path_or_name: str | Path,
    task: str | None = None,
    keep_columns: bool = False,
    columns: Mapping[str, str] = NO_COLUMNS,
    held_out: bool = False,
) -> list[Record]:
    """Return all problems with an answer. ``task`` names them, by default the row's ``data_source``
    or the file's name. ``keep_columns`` keeps the :func:`columns` of each row for a user's
    verifier, which may do without an answer.

    ``columns`` are the names under which a file has problem, answer and so on; a row without one of
    them is refused, or read as it is if the problems are ``held_out`` for an evaluation.
    """
    gym = is_gym(path_or_name)
    keep_columns = keep_columns or gym
    rows: Iterable[tuple[int, Row]]
    if gym:
        rows = enumerate(load_part(_GYM_ROWS)(str(path_or_name)))
    else:
        found = enumerate(read_rows(path_or_name))
        rows = _renamed(
            found, columns, str(path_or_name), must_have=not held_out, keep_columns=keep_columns
        )
    name = task or task_name(path_or_name)
    passage = columns.get("context")
    records, left_out, dropped = split_usable_rows(
        rows,
        name,
        forced=task is not None,
        source=str(path_or_name),
        keep_columns=keep_columns,
        passage="" if gym else passage,
    )
    for what, count in dropped.items():
        logger.warning("%s: dropped %d rows %s", path_or_name, count, what)
    if left_out:
        logger.warning("%s: %s", path_or_name, untested_note(left_out))
    if not records:
        raise UserError(f"{path_or_name}: no problem with an answer in it")
    return records


def _renamed(
    rows: Iterable[tuple[int, Row]],
    columns: Mapping[str, str],
    source: str,
    must_have: bool,
    keep_columns: bool,
) -> Iterator[tuple[int, Row]]:
    """Yield the rows with their columns under our names too. A name with dots is a field of an
    object (``extra_info.answer``). The answer that is named stands for the one in ``reward_model``,
    and for those of other columns, which are left out unless all columns are to be kept. Rows
    without a named column are refused if they ``must_have`` it; else they stay as they are, and a
    line says so.
    """
    left_out = {ours for ours, theirs in columns.items() if not theirs}
    left_out |= set(SYSTEMS) if "system" in left_out else set()
    is_said = False
    for index, row in rows:
        values = {ours: _field(row, theirs) for ours, theirs in columns.items() if theirs}
        missing = [columns[ours] for ours, value in values.items() if value is _ABSENT]
        if missing and must_have:
            raise UserError(
                f"{source}: row {index + 1} has no column {missing[0]!r}, which data.columns "
                f"names; found {', '.join(map(str, row)) or 'nothing'}"
            )
        if missing:
            if not is_said:
                logger.info(
                    "%s: data.columns is not read, because row %d has no column %r",
                    source,
                    index + 1,
                    missing[0],
                )
            is_said = True
            yield index, row
            continue
        values.pop("context", None)
        kept = {name: value for name, value in row.items() if name not in left_out}
        if "answer" in values:
            kept.pop("reward_model", None)
            if not keep_columns:
                kept = {name: kept[name] for name in kept if name not in ANSWER_COLUMNS}
        yield index, {**kept, **values}


def _field(row: Row, name: str) -> object:
    """Return a column, or a field of an object in it; ``_ABSENT`` if there is none."""
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def split_usable_rows(
    rows: Iterable[tuple[int, Row]],
    task: str,
    forced: bool,
    source: str,
    keep_columns: bool = False,
    passage: str | None = None,
) -> tuple[list[Record], list[str], Counter[str]]:
    """Return the problems among the numbered ``rows``, the names of those whose tests assert
    nothing, and how many were dropped for which other reason.

    ``passage`` is the column of the passage that a question is about: None for one of the known
    names (``passages.py``), "" for none.
    """
    records: list[Record] = []
    left_out: list[str] = []
    dropped: Counter[str] = Counter()
    unread = Unread(source)
    chats = ChatReader(source, unread)
    for index, original in rows:
        if has_media(original):
            dropped["with an image, a video or audio, which the policy cannot read"] += 1
            continue
        row = with_chat(original, chats, index + 1)
        try:
            record = to_record(row, index, task, forced, source, keep_columns)
        except OtherLanguage:
            dropped["with tests for other languages than Python"] += 1
        except Untested as name:
            left_out.append(str(name))
        except NoAnswer as key:
            dropped[f"with the key {str(key)!r:.40}, which no answer equals"] += 1
        else:
            if record is None:
                dropped["without an answer"] += 1
                continue
            where = f"{source}: row {index + 1}"
            record = _about(record, *_passage(row, passage, where))
            record = surrounded(record, row, chats, where)
            records.append(replace(record, labels=labels_of(row)))
            if not keep_columns:
                shown = [] if passage is None else [passage]
                shown += _shown_columns(row, record.messages)
                keys = KEYS if record.tests is None else KEYS_OF_PROGRAMS
                unread.take(row, keys, index + 1, used=shown)
    unread.report()
    return records, left_out, dropped


def _shown_columns(row: Row, messages: Messages) -> list[str]:
    """Return the columns whose text the messages show."""
    text = "\n".join(message["content"] for message in messages)
    return [
        name for name, value in row.items() if isinstance(value, str) and shows(text, value.strip())
    ]


def _passage(row: Row, column: str | None, where: str) -> tuple[str, bool]:
    """Return the passage of a row in a named column, or in one of a known name, and whether it is
    put behind the question; "" if the name is empty or if there is none.
    """
    if column == "":
        return "", False
    value = _ABSENT if column is None else _field(row, column)
    if column is None or value is _ABSENT:
        return passage_of(row, where)
    return passage_text(value, column, where), False


def with_chat(row: Row, chats: ChatReader, number: int) -> Row:
    """Return a row with the chat that is its problem as a list of messages, and a chat in
    ``messages`` or ``conversations`` as its prompt where it has no other.
    """
    column = _first_column(row, PROBLEM_COLUMNS)
    if column is None and not {"Question", "Problem", "question_content"} & set(row):
        column = next((name for name in CHAT_COLUMNS if not is_empty(row.get(name))), None)
    value = None if column is None else row[column]
    is_text = isinstance(value, str) and column not in CHAT_COLUMNS and not is_chat_text(value)
    if is_empty(value) or is_text or isinstance(value, int | float):
        return row
    is_stem = isinstance(value, Mapping) and not is_message(value)
    if is_stem:  # a question with its options
        return row
    read = chats.chat(value, number)
    if any(weight is not None for weight in read.weights[-1:]):
        raise UserError(
            f"{chats.source}: row {number}: the last message says whether it is to be trained; a "
            "prompt is not"
        )
    name = "prompt" if column in CHAT_COLUMNS else column
    return {**row, str(name): list(read.messages)}


def surrounded(record: Record, row: Row, chats: ChatReader, where: str) -> Record:
    """Return a problem with the earlier turns, the system message and the tools of its row."""
    messages = record.messages
    column = _first_column(row, PROBLEM_COLUMNS)
    prompt = None if column is None else row[column]
    if isinstance(prompt, list) and len(messages) == 1:  # of which only the last is the statement
        messages = (*prompt[:-1], *messages)
    number = record.index + 1
    messages = behind_history(messages, history_of(row.get("history"), chats, number, where))
    for name in SYSTEMS:
        messages = with_system(messages, row.get(name), name, where)
    tools = tools_of(row.get("tools"), where)
    if messages is record.messages and not tools:
        return record
    return replace(record, messages=messages, tools=tools)


def _about(record: Record, passage: str, behind: bool) -> Record:
    """Return a problem with its passage."""
    messages = with_passage(record.messages, passage, behind)
    about = replace(record, messages=messages)
    if record.row is not None and "problem" in record.row:
        about = replace(about, row={**record.row, "problem": about.problem})
    return about


def untested_note(names: Sequence[str]) -> str:
    """Return what to say about programming problems whose tests assert nothing."""
    return f"left out {len(names)} tasks whose tests assert nothing: {', '.join(names)}"


def to_record(
    row: Row,
    index: int,
    task: str,
    forced: bool = True,
    source: str = "row",
    keep_columns: bool = False,
) -> Record | None:
    """Return one row as a problem with its answer; ``None`` when the answer is null or empty,
    unless its columns are kept.

    Raises :class:`UserError` for unreadable rows, ``OtherLanguage`` for programs that are not to be
    Python's, and ``Untested`` for tests that assert nothing.
    """
    name = task if forced else str(row.get("data_source") or task)
    where = f"{source}: row {index + 1}"
    code = load_part(_PACKED_PROBLEM)(row, where) if may_have_tests(row) else None
    if code is not None:
        packed, key = code.tests, code.key
        messages = _as_messages(code.statement, where)
        kept = columns(row, name, messages, key) if keep_columns else None
        return Record(name, index, messages, key, packed, kind_of_row(row), kept, "code")
    question = question_of(row, index, where, strict=not keep_columns)
    if question is not None:
        messages, own = _as_messages(question.text, where), question.columns
        kept = {**columns(row, name, messages, None), **own} if keep_columns else own
        return Record(
            name,
            index,
            messages,
            question.answer,
            kind=question.kind or kind_of_row(row),
            row=kept,
            form=question.form,
        )
    problem = _first_column(row, PROBLEM_COLUMNS)
    keys = _keys_of(row)
    if problem is None or not (keys or keep_columns):
        raise _without_column(row, where, "problem" if problem is None else "answer")
    raw = next(iter(keys.values()), None)
    messages = _as_messages(row[problem], where)
    is_aime = "aime" in name.lower() or "aime_number" in row
    if keep_columns:
        answer = _shown(raw, is_aime)
        kept = columns(row, name, messages, answer if isinstance(raw, str) else raw)
        return Record(name, index, messages, answer, kind=kind_of_row(row), row=kept)
    _check_one_key(keys, is_aime, where)
    if not is_structured(raw):
        answer_of(raw, where)  # refuses what is no text and no number
        answer = final_answer(raw, integer=is_aime)
        if not answer:
            return None
        if is_no_answer(answer):
            raise NoAnswer(answer)
        return Record(name, index, messages, answer, kind=kind_of_row(row))
    found = answer_of(raw, where)
    if found.texts and all(map(is_no_answer, found.texts)):
        raise NoAnswer(found.texts[0])
    if not found.texts:
        return None
    shown = final_answer(found.texts[0], integer=is_aime)
    read = None if found.column is None else {"answer": found.column}
    return Record(name, index, messages, shown, kind=kind_of_row(row), row=read)


def _keys_of(row: Row) -> dict[str, object]:
    """Return what a row may have as its answer, by column: what ``reward_model`` says, or else the
    columns that say something; a column that says nothing if there is no other one.
    """
    reward_model = row.get("reward_model")
    keys = _columns_of(row, ANSWER_COLUMNS)
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        truth = reward_model["ground_truth"]
        if not is_empty(truth) or all(map(is_empty, keys.values())):
            return {"reward_model.ground_truth": truth}
    return keys


def _check_one_key(keys: Mapping[str, object], integer: bool, where: str) -> None:
    """Raise :class:`UserError` if columns hold different answers."""
    if len(keys) < 2:
        return
    texts = {
        name: final_answer(key, integer=integer)
        for name, key in keys.items()
        if not is_structured(key)
    }
    for first, other in itertools.pairwise(texts):
        if texts[first] != texts[other]:
            raise UserError(
                f"{where} has two answers, {texts[first]!r:.40} in {first} and "
                f"{texts[other]!r:.40} in {other}; name one, data.columns={{answer: {first}}}"
            )


def _without_column(row: Row, where: str, missing: str) -> UserError:
    """Return the error of a row without a problem or an answer."""
    expected: tuple[str, ...] = (*PROBLEM_COLUMNS, *CHAT_COLUMNS)
    what = f"{missing} column"
    if missing == "answer":
        expected = (*ANSWER_COLUMNS, "reward_model.ground_truth")
        what = "answer column, and there are no tests in this row in a form that is read"
    return UserError(
        f"{where} has no {what}; found {', '.join(map(str, row)) or 'nothing'}; expected "
        f"one of {', '.join(expected)}; or name yours, data.columns={{{missing}: NAME}} "
        "(dcpo evaluate takes it too, or --as-trained CONFIG)"
    )


def _shown(raw: object, integer: bool) -> str:
    """Return the answer as text where a user's verifier reads the value itself."""
    if isinstance(raw, list | tuple | Mapping):
        return json.dumps(raw, default=str, ensure_ascii=False)
    return final_answer(raw, integer=integer)


def columns(row: Row, name: str, messages: Messages, answer: object) -> Row:
    """Return all columns of a row, and under fixed names the ``problem`` as text and its
    ``answer``: a text as :func:`final_answer`, anything else as it is. ``data_source``: the row's,
    else the ``name`` of the data.
    """
    return {
        "data_source": name,
        **row,
        "problem": prompts.bare_problem(messages[-1]["content"]),
        "answer": answer,
    }


def final_answer(raw: object, integer: bool = False) -> str:
    r"""Return the answer key as text: GSM8K's part behind ``####`` without thousands commas, the
    last box of a worked solution, whole floats as integers.

    ``integer`` (AIME keys): leading zeros and a degree sign are notation: 025 -> 25, 336^\circ ->
    336.
    """
    if raw is None:
        return ""
    if isinstance(raw, float):
        return "" if raw != raw else str(int(raw)) if raw.is_integer() else repr(raw)
    text = str(raw).strip()
    if final := text.rsplit("\n", 1)[-1].partition("####")[2].strip():
        return _THOUSANDS.sub("", final)
    if boxed := last_box(text):
        return boxed
    if integer and (digits := re.fullmatch(r"(\d{1,1000})(?:\^\\circ|\^\{\\circ\})?", text)):
        return str(int(digits.group(1)))
    return text


# -------------------------------------------------------------------------------------- small parts


def _first_column(row: Row, names: Sequence[str]) -> str | None:
    """Return the first column that says something, or else the first that the row has."""
    return next(iter(_columns_of(row, names)), None)


def _columns_of(row: Row, names: Sequence[str]) -> dict[str, object]:
    """Return the columns of these names that say something, or else all that the row has."""
    present = {name: row[name] for name in names if name in row}
    full = {name: value for name, value in present.items() if not is_empty(value)}
    return full or present


def _as_messages(
    problem: object, where: str, chats: ChatReader | None = None, number: int = 0
) -> Messages:
    """Return the messages of a problem column: a text, or a list of chat messages as verl and TRL
    have it, also as JSON text or as Python's repr.
    """
    if isinstance(problem, str) and problem.strip() and not is_chat_text(problem):
        return ({"role": "user", "content": problem},)
    messages: Messages = ()
    if problem and isinstance(problem, str | list | tuple | Mapping):
        messages = (chats or ChatReader(where)).chat(problem, number).messages
    if not messages or messages[-1]["role"] != "user":
        raise UserError(
            f"{where}: the problem is neither text nor a list of messages that ends with the user's"
        )
    return messages


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
