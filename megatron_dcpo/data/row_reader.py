"""From a raw row of a data file to the schema (``types.SchemaRow``): the same for problems,
demonstrations and benchmarks.

A function of the user's, ``data.row``, reads the whole row. Without one, each of our names is read
from the first of these that there is: the column that ``data.columns`` names; what a preset makes
of the row of a public set (``row_presets.py``); a column of a known name (:data:`KNOWN`), in any
case of its letters.

What was read, and which columns with content were not, is said once for each source
(:meth:`RowReader.report`).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from megatron_dcpo.data.answer_keys import final_answer, is_structured
from megatron_dcpo.data.chats import REASONING, is_empty, parsed_text
from megatron_dcpo.data.labels import KIND_COLUMNS
from megatron_dcpo.data.row_files import Row
from megatron_dcpo.data.row_presets import PRESETS
from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.runtime.plugins import check_signature, load_object, raised
from megatron_dcpo.types import SCHEMA, SchemaRow

logger = logging.getLogger(__name__)

# the columns that are read without being named, by our names; of several the first with content
KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "problem": ("problem", "question", "prompt"),
        "messages": ("messages", "conversations"),
        "answer": ("reward_model.ground_truth", "answer", "ground_truth", "final_answer"),
        "options": ("options", "choices"),
        "tests": ("tests",),
        "outcome": ("outcome",),
        "response": ("response", "completion", "output", "solution"),
        "reasoning": REASONING,
        "weight": ("weight",),
        "spans": ("spans",),
        "system": ("system",),
        "context": ("context",),
        "tools": ("tools",),
        "kind": KIND_COLUMNS,
        "data_source": ("data_source",),
    }
)
_BY_FUNCTION = "or read the rows by a function, data.row (examples/rows)"
# Columns, and keys of a message, that change what is asked or learned, and the name by which each
# could be read: refused where they have content that is not read, nor shown by the problem.
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("instruction", "prefix", "suffix"), "problem"),
        **dict.fromkeys(("input", "context"), "context"),
        **dict.fromkeys(("tools", "functions"), "tools"),
        "system": "system",
        "history": "messages",
        **dict.fromkeys(("weight", "loss", "loss_mask", "mask", "label", "labels"), "weight"),
        **dict.fromkeys(("train", "trainable", "train_on_turn", "learn", "ignore"), "weight"),
    }
)
# columns that an empty name leaves out besides the known ones
_LEFT_OUT_WITH: Mapping[str, tuple[str, ...]] = MappingProxyType({"context": ("input",)})
# what is seen or heard, or where it is: images, image_1, decoded_image, video_url, audio_path
_MEDIA = re.compile(
    r"(?:decoded_|input_|question_|problem_|raw_)?"
    r"(?:image|img|picture|photo|video|audio)s?(?:_?\d+)?"
    r"(?:_(?:urls?|paths?|files?|bytes|base64|b64|data|ids?|names?|src|list))*"
)
_ABSENT = object()
# what a preset raises for a row of another form
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, SyntaxError, RecursionError)


class Purpose(NamedTuple):
    """What a kind of data reads of a row: names of the schema, and pairs of them of which the
    second is not read where the first has content.
    """

    names: frozenset[str]
    instead: tuple[tuple[str, str], ...]


_OF_A_PROMPT = ("problem", "messages", "options", "system", "context", "tools")
PROBLEMS = Purpose(
    names=frozenset({*_OF_A_PROMPT, "answer", "tests", "outcome", "form", "kind", "data_source"}),
    instead=(
        ("problem", "messages"),
        *((name, "outcome") for name in ("answer", "tests")),
    ),
)
DEMONSTRATIONS = Purpose(
    names=frozenset({*_OF_A_PROMPT, "response", "answer", "reasoning", "weight", "spans"}),
    instead=(
        *(("messages", name) for name in ("problem", "response", "answer")),
        ("response", "answer"),
    ),
)


@dataclass(frozen=True)
class RowOptions:
    """How the rows of a source are read: ``data.columns``, ``data.row`` and ``data.unread``.

    ``held_out``: a row that lacks one of the ``columns`` is read as if none were named. ``order``
    is the column of a curriculum.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    row: str = ""
    unread: Literal["say", "refuse"] = "say"
    held_out: bool = False
    order: str = ""


PLAIN = RowOptions()


class ReadRow(NamedTuple):
    """A row as it was read. ``has`` are the names that it has, also with an empty value;
    ``columns`` are those of the file, and what ``data.columns`` names.
    """

    row: SchemaRow
    has: frozenset[str]
    columns: Row


class _Source(NamedTuple):
    """Where a value was read: in a ``column``, or by the ``preset`` in those that it looked at."""

    columns: frozenset[str]
    column: str = ""
    preset: str = ""


class RowReader:
    """The reader of the rows of a source, which counts what it has read. ``kept``: a verifier of
    the user's gets every column, so that none is unread.
    """

    def __init__(
        self, source: str, options: RowOptions, purpose: Purpose, kept: bool = False
    ) -> None:
        self.source = source
        self._options = options
        self._purpose = purpose
        self._kept = kept
        self._function = _function_of(options.row)
        self._rows = 0
        self._left_out = 0
        self._read: dict[str, dict[str, None]] = {}  # columns by what they became
        self._unread: Counter[str] = Counter()  # rows in which a column has content
        self._counted: set[str] = set()  # of these, in the row that is being read

    def read(self, raw: Row, number: int) -> ReadRow | None:
        """Return row ``number``, None if ``data.row`` leaves it out. Raises :class:`UserError`,
        which names the row.
        """
        self._rows += 1
        self._counted.clear()
        if self._function is not None:
            return self._by_function(self._function, raw, number)
        named = self._named_columns(raw, number)
        visible = _without_left_out(raw, named)
        values, sources = self._values(visible, named, number)
        for ours in _not_chosen(values, named, self._purpose):
            del values[ours], sources[ours]
        row = SchemaRow(**values)
        if not self._kept:
            self._check_alternatives(visible, set(sources) - set(named), sources, number)
        self._take(visible, row, sources, named, number)
        by_name = {ours: values[ours] for ours in named if ours in values}
        return ReadRow(row, frozenset(values), {**raw, **by_name})

    def unread_key(self, key: str, value: object, number: int) -> None:
        """Count a key of a message of row ``number`` that is not read. Raises :class:`UserError`
        for one that changes what is asked or learned.
        """
        if not is_empty(value):
            self._refuse(key, value, number, is_column=False)
            self._count(f"{key} of a message")

    def report(self) -> None:
        """Log what was read and what was not. Raises :class:`UserError` if ``data.unread`` refuses
        columns with content that were not read.
        """
        read = [f"{', '.join(columns)} -> {what}" for what, columns in self._read.items()]
        unread = [
            f"{column:.60} ({100 * count / self._rows:.3g} %)"
            for column, count in self._unread.most_common()
        ]
        shown = ", ".join(unread) or "nothing"
        if self._kept:
            shown = "nothing, because the verifier gets every column"
        line = f"read: {'; '.join(read) or 'nothing'}. Not read: {shown}"
        if self._left_out:
            line += f". Left out by data.row: {self._left_out} rows"
        logger.info("%s: %d rows, %s", self.source, self._rows, line)
        if unread and self._options.unread == "refuse":
            raise UserError(
                f"{self.source}: data.unread=refuse, and columns with content are not read: "
                f"{shown}; name them by data.columns, remove them, {_BY_FUNCTION}"
            )

    # ------------------------------------------------------------------------------- by a function
    def _by_function(
        self, function: Callable[[Row], object], raw: Row, number: int
    ) -> ReadRow | None:
        where = f"{self.source}: row {number}: data.row={self._options.row}"
        watched = _Watched(raw)
        try:
            values = function(watched)
        except Exception as error:
            raise UserError(f"{where}: {raised(error)}; None leaves a row out") from error
        if values is None:
            self._left_out += 1
            return None
        if not isinstance(values, Mapping):
            kind = type(values).__name__
            raise UserError(f"{where}: expected a mapping from our names, or None, got {kind}")
        for name in values:
            if name not in SCHEMA:
                raise UserError(
                    f"{where}: {name!r:.60} is no name of ours{did_you_mean(str(name), SCHEMA)}; "
                    f"they are {', '.join(SCHEMA)}"
                )
        columns = [str(column) for column in raw if str(column) in watched.looked_at]
        self._became(", ".join(values), columns)
        self._count_unread(raw, watched.looked_at)
        for name in values:
            if name not in self._purpose.names and not is_empty(values[name]):
                self._count(f"{name} of data.row")
        return ReadRow(SchemaRow(**values), frozenset(values), raw)

    # ---------------------------------------------------------------------------------- by columns
    def _named_columns(self, raw: Row, number: int) -> Mapping[str, str]:
        """Return ``data.columns`` for a row. Raises :class:`UserError` if the row lacks one."""
        columns = self._options.columns
        for theirs in columns.values():
            if not theirs or field_of(raw, theirs) is not _ABSENT:
                continue
            if self._options.held_out:
                return {}
            raise UserError(
                f"{self.source}: row {number} has no column {theirs!r}, which data.columns names; "
                f"{what_there_is(raw)}"
            )
        return columns

    def _values(
        self, raw: Row, named: Mapping[str, str], number: int
    ) -> tuple[dict[str, object], dict[str, _Source]]:
        """Return the values of a row by our names, and where each was read."""
        values: dict[str, object] = {}
        sources: dict[str, _Source] = {}
        for ours, known in KNOWN.items():
            present = _present(raw, known)
            if present:
                full = (column for column, value in present.items() if not is_empty(value))
                first = next(full, next(iter(present)))
                values[ours], sources[ours] = present[first], _source_of(first)
        preset = next((one for one in PRESETS if one.is_form_of(raw)), None)
        if preset is not None:
            watched = _Watched(raw)
            try:
                given = preset.read(watched, number - 1)
            except _MALFORMED as error:
                raise UserError(
                    f"{self.source}: row {number}: not readable as a row of {preset.title} "
                    f"({type(error).__name__}: {str(error)[:200]})"
                ) from None
            source = _Source(frozenset(watched.looked_at), preset=preset.title)
            values |= given
            sources |= dict.fromkeys(given, source)
        for ours, theirs in named.items():
            if theirs:
                values[ours], sources[ours] = field_of(raw, theirs), _source_of(theirs)
        return values, sources

    def _check_alternatives(
        self, raw: Row, names: Iterable[str], sources: Mapping[str, _Source], number: int
    ) -> None:
        """Raise :class:`UserError` if another column of a known name says something else than the
        answer or the response, or if there is an answer longer than the response.
        """
        for ours in {"answer", "response"}.intersection(names):
            present = _present(raw, KNOWN[ours])
            first = sources[ours].column
            if first not in present or "." in first or is_structured(present[first]):
                continue
            said = _compared(ours, present[first])
            others = {one: value for one, value in present.items() if not is_structured(value)}
            if ours == "response" and isinstance(raw.get("answer"), str):
                others["answer"] = raw["answer"] if len(raw["answer"]) > len(said) else said
            for other, value in others.items():
                if not is_empty(value) and _compared(ours, value) != said:
                    raise UserError(
                        f"{self.source}: row {number}: {first} and {other} could each be the "
                        f"{ours}, and they differ; name one, data.columns={{{ours}: {first}}}"
                    )

    # ------------------------------------------------------------------------------- what was read
    def _take(
        self,
        raw: Row,
        row: SchemaRow,
        sources: Mapping[str, _Source],
        named: Iterable[str],
        number: int,
    ) -> None:
        """Count the columns of a row. Raises :class:`UserError` for one that is refused."""
        read = {self._options.order}
        # known columns of what is named otherwise, or what a preset leaves out
        left_out = _columns_of(named)
        by_preset: list[str] = []
        for ours, source in sources.items():
            read |= source.columns
            if source.column:
                self._became(ours, [source.column])
            elif getattr(row, ours) is None:
                left_out |= _columns_of([ours])
            else:
                by_preset.append(ours)
        if by_preset:
            source = sources[by_preset[0]]
            columns = [str(column) for column in raw if str(column) in source.columns]
            self._became(f"{', '.join(by_preset)} of {source.preset}", columns)
        problem = _text_in([row.problem, row.messages])
        for column, value in raw.items():
            name = str(column)
            if name not in read and isinstance(value, str) and _shows(problem, value.strip()):
                read.add(name)
            if not (name in read or name.lower() in left_out or is_empty(value)):
                self._refuse(name, value, number)
        self._count_unread(raw, read)

    def _became(self, what: str, columns: Iterable[str]) -> None:
        self._read.setdefault(what, {}).update(dict.fromkeys(columns))

    def _count_unread(self, raw: Row, read: Iterable[str]) -> None:
        known = set(read)
        for column, value in raw.items():
            if str(column) not in known and not self._kept and not is_empty(value):
                self._count(str(column))

    def _count(self, column: str) -> None:
        """Count a column once in the row that is being read."""
        if column not in self._counted:
            self._counted.add(column)
            self._unread[column] += 1

    def _refuse(self, name: str, value: object, number: int, is_column: bool = True) -> None:
        what = f"column {name!r:.60}" if is_column else f"key {name!r:.60} of a message"
        if self._function is not None:
            return
        if _MEDIA.fullmatch(name.lower()) and value is not False:
            raise UserError(
                f"{self.source}: row {number}: the {what} is not read, because only text is; "
                f"remove the rows that have it, {_BY_FUNCTION}"
            )
        ours = REFUSED.get(name.lower())
        if ours is not None and not self._kept:
            remedy = ""
            if is_column and ours in self._purpose.names:
                remedy = f"name it, data.columns={{{ours}: {name}}}, "
            raise UserError(
                f"{self.source}: row {number}: the {what} is not read, and it may change what is "
                f"asked or learned; {remedy}remove it, {_BY_FUNCTION}"
            )


class _Watched(dict[Any, Any]):
    """A copy of a row that takes note of the columns that are looked at."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.looked_at: set[str] = set()

    def __getitem__(self, key: object) -> Any:  # noqa: ANN401 - what the file holds
        self.looked_at.add(str(key))
        return super().__getitem__(key)

    def get(self, key: object, default: object = None) -> Any:  # noqa: ANN401 - as above
        self.looked_at.add(str(key))
        return super().get(key, default)

    def pop(self, key: object, *default: object) -> Any:  # noqa: ANN401 - as above
        self.looked_at.add(str(key))
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[Any]:  # with it, dict(row) and {**row} look at every column
        return super().__iter__()

    def items(self) -> Any:  # noqa: ANN401 - as above
        self.looked_at.update(map(str, self))
        return super().items()

    def values(self) -> Any:  # noqa: ANN401 - as above
        self.looked_at.update(map(str, self))
        return super().values()


# -------------------------------------------------------------------------------------- small parts


def field_of(row: Row, name: str) -> object:
    """Return a column, or by a name with dots a field of an object in it, which may be JSON text;
    ``_ABSENT`` if there is none.
    """
    if name in row:
        return row[name]
    value: object = row
    for part in name.split("."):
        if isinstance(value, str):
            value = parsed_text(value)
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def what_there_is(row: Row) -> str:
    """Return the names of a row's columns for a message."""
    return f"its columns are {', '.join(map(str, row)) or 'none'}"


def _function_of(path: str) -> Callable[[Row], object] | None:
    """Return the function that ``data.row`` names, None if it is empty. Raises :class:`UserError`
    for one that does not take a row.
    """
    if not path:
        return None
    function: Callable[[Row], object] = load_object(path, "data.row")
    check_signature(function, path, "data.row", "row")
    return function


def _source_of(column: str) -> _Source:
    return _Source(frozenset({column, column.partition(".")[0]}), column)


def _present(row: Row, known: Iterable[str]) -> dict[str, object]:
    """Return the columns of known names that a row has, by the names that it gives them."""
    spelled = {str(column).lower(): str(column) for column in row}
    present = {}
    for name in known:
        column = name if "." in name or name in row else spelled.get(name, name)
        value = field_of(row, column)
        if value is not _ABSENT:
            present[column] = value
    return present


def _without_left_out(row: Row, named: Mapping[str, str]) -> Row:
    """Return the row without the columns of those of our names that are named as empty."""
    left_out = _columns_of(ours for ours, theirs in named.items() if not theirs)
    if not left_out:
        return row
    return {column: value for column, value in row.items() if str(column).lower() not in left_out}


def _columns_of(names: Iterable[str]) -> set[str]:
    """Return the columns that are known by some of our names."""
    columns: set[str] = set()
    for ours in names:
        columns.update((ours, *KNOWN.get(ours, ()), *_LEFT_OUT_WITH.get(ours, ())))
    return columns


def _not_chosen(
    values: Mapping[str, object], named: Mapping[str, str], purpose: Purpose
) -> set[str]:
    """Return the names that are not read for a purpose, or that another one stands for."""
    dropped = set(values) - purpose.names
    for first, second in purpose.instead:
        if {first, second} & dropped or first not in values or second not in values:
            continue
        has_content = not is_empty(values[first]) or is_empty(values[second])
        is_named_alone = bool(named.get(second)) and not named.get(first)
        dropped.add(second if has_content and not is_named_alone else first)
    return dropped


def _compared(ours: str, value: object) -> str:
    """Return a text by which two columns are compared that could be an answer or a response."""
    return final_answer(value, integer=True) if ours == "answer" else str(value).strip()


def _text_in(value: object) -> str:
    """Return the texts of a problem, also of one that is a list of messages."""
    if isinstance(value, list | tuple):
        return "\n".join(map(_text_in, value))
    if isinstance(value, Mapping):
        return _text_in(value.get("content", value.get("value")))
    return value if isinstance(value, str) else ""


def _shows(text: str, part: str) -> bool:
    """Return whether a text has another one in it, and not only inside of a word or a number."""
    if not part or part not in text:
        return False
    before = r"(?<!\w)" if re.match(r"\w", part) else ""
    behind = r"(?!\w)" if re.match(r"\w", part[-1]) else ""
    return re.search(f"{before}{re.escape(part)}{behind}", text) is not None
