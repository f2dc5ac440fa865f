"""The rule for the keys of rows and messages: a key is read, known to be harmless, or refused by
name. What a reader does not know is counted, and said once for each source.

A reader declares its :class:`RowKeys`. :class:`Unread` does the rest, for every reader the same.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dcpo.errors import UserError

logger = logging.getLogger(__name__)

# Where a row comes from and what it is about; nothing that is asked or answered.
_METADATA_NAMES = (
    "ability author category categories config created_at data_source dataset dataset_name "
    "date difficulty domain extra_info generator grade hash id idx index info kind lang "
    "language length level license link meta metadata model model_name name origin pass_rate "
    "quality score solve_rate source sources split style subdomain subfield subject subset tag "
    "tags task task_name timestamp title token_count topic topics type uid unique_id url urls "
    "uuid verified version year"
)
METADATA = frozenset(_METADATA_NAMES.split())
_METADATA = re.compile(
    r"_.*|unnamed: ?\d+|(?:num|n|has)_.+|is_(?!correct\b|right\b|true\b).+|"
    r".+_(?:id|ids|idx|index|url|hash|name|number|source)|"
)
# what is seen or heard, or where it is: images, image_1, decoded_image, video_url, audio_path
_MEDIA = re.compile(
    r"(?:decoded_|input_|question_|problem_|raw_)?"
    r"(?:image|img|picture|photo|video|audio)s?(?:_?\d+)?"
    r"(?:_(?:urls?|paths?|files?|bytes|base64|b64|data|ids?|names?|src|list))*"
)


@dataclass(frozen=True)
class RowKeys:
    """What a reader does with the keys of a row or a message: those that it has ``read``, and, in
    any case of their letters, ``harmless`` ones besides :data:`METADATA`, and ``refused`` ones with
    what to do about each; what :func:`is_media` is refused by every reader. ``what`` is the
    field's word for a key.
    """

    what: str
    read: frozenset[str]
    harmless: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)

    def is_known(self, key: str) -> bool:
        """Return whether a key is read or harmless."""
        name = key.lower()
        if name in self.refused or is_media(key):
            return False
        known = key in self.read or name in self.harmless or name in METADATA
        return known or _METADATA.fullmatch(name) is not None


def is_media(key: str) -> bool:
    """Return whether a key is by its name an image, a video or an audio recording, or says where
    one is.
    """
    return _MEDIA.fullmatch(key.lower()) is not None


def holds_media(key: str, value: object) -> bool:
    """Return whether a key that :func:`is_media` has a value; false says that there is none."""
    return is_media(key) and value is not False and not is_empty(value)


def is_empty(value: object) -> bool:
    """Return whether a value says nothing: null, NaN, an empty text, list or object, or an object
    in which every value is one of these, as a table has it where other rows have one.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return isinstance(value, list | tuple) and len(value) == 0


def shows(text: str, part: str) -> bool:
    """Return whether a text has another one in it, and not only inside of a word or a number."""
    if not part or part not in text:
        return False
    before = r"(?<!\w)" if re.match(r"\w", part) else ""
    behind = r"(?!\w)" if re.match(r"\w", part[-1]) else ""
    return re.search(f"{before}{re.escape(part)}{behind}", text) is not None


def without_empty(value: object) -> object:
    """Return a value without the null values of its objects, at every depth: a table gives every
    object the keys of all others.
    """
    if isinstance(value, Mapping):
        return {key: without_empty(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_empty(one) for one in value]
    return value


class Unread:
    """The keys of a source that its reader does not know, each with the number of its rows and the
    first of them.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._rows: dict[tuple[str, str], list[int]] = {}

    def take(
        self, values: Mapping[Any, object], keys: RowKeys, number: int, used: Iterable[str] = ()
    ) -> None:
        """Look at the keys of row ``number``, or of a message in it. ``used`` are further ones that
        were read. Raises :class:`UserError` for a key that is refused.
        """
        taken = set(used)
        for key, value in values.items():
            if key in taken or is_empty(value) or keys.is_known(str(key)):
                continue
            remedy = keys.refused.get(str(key).lower())
            if remedy is None and holds_media(str(key), value):
                remedy = "only text is read; remove the rows that have it"
            if remedy is not None:
                raise UserError(
                    f"{self._source}: row {number}: the {keys.what} {str(key)!r:.60} is not read, "
                    f"and it means something; {remedy}"
                )
            self.count(keys.what, str(key), number)

    def count(self, what: str, key: str, number: int) -> None:
        """Count a key of row ``number`` that is not read."""
        count_and_first = self._rows.setdefault((what, key), [0, number])
        count_and_first[0] += 1

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return the number of rows, and the first of them, of every key that is not known."""
        return {key: (count, first) for (_, key), (count, first) in self._rows.items()}

    def report(self) -> None:
        """Say once what was not read."""
        for what in dict.fromkeys(what for what, _ in self._rows):
            listed = [
                f"{key!r:.60} ({count} rows, the first is row {first})"
                for (kind, key), (count, first) in self._rows.items()
                if kind == what
            ]
            logger.warning("%s: not read, by their %s: %s", self._source, what, ", ".join(listed))
