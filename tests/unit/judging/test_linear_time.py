"""What runs in the trainer's own process on a text of others takes time in proportion to its
length.

Every parser is timed on every hostile text at growing lengths, by the processor time of this
thread. The exponent of growth is fitted between the two longest: 1 is linear, 2 quadratic. A parser
that is much too slow at a shorter length is not run at the longer ones.
"""

from __future__ import annotations

import gc
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron_dcpo.cli.judge import read_answer
from megatron_dcpo.data.answer_keys import final_answer
from megatron_dcpo.data.prompts import bare_problem, box_instruction
from megatron_dcpo.errors import one_line
from megatron_dcpo.evaluation.report import render_report
from megatron_dcpo.evaluation.runs import EvaluatedRun
from megatron_dcpo.evaluation.samples import Sample, sample_line
from megatron_dcpo.judging import answers
from megatron_dcpo.judging.abstention import normalize
from megatron_dcpo.judging.answers import (
    BOXED,
    FENCED,
    Attempt,
    Outcome,
    extract_boxed,
    extract_program,
)
from megatron_dcpo.judging.blocks import split_text
from megatron_dcpo.judging.confidence import parse_confidence
from megatron_dcpo.judging.judge import with_text
from megatron_dcpo.judging.math import plain_text, words
from megatron_dcpo.judging.math.equivalence import quick_verdict
from megatron_dcpo.judging.option_letters import chosen_letter
from megatron_dcpo.judging.questions import normalize_triviaqa
from megatron_dcpo.judging.replies import response_of_choice
from megatron_dcpo.judging.same_program import normal_form
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.runtime.text import encodable, parse_json, printable
from megatron_dcpo.types import Prompt, Response
from tests.helpers.cases import full_only
from tests.helpers.evaluated import make_sample
from tests.helpers.hostile import HOSTILE
from tests.helpers.judging import judge

pytestmark = pytest.mark.slow

LENGTHS = (250, 800, 2_500, 8_000, 80_000)
LARGEST_EXPONENT = 1.6  # between linear and quadratic; a busy machine moved linear ones to 1.53
# at the longest text: nothing that grows faster than linearly is that fast there
NOISE_SECONDS = 0.01
HOPELESS_SECONDS = (
    1.0  # at a shorter one: 40 times what the slowest parser here takes at the longest
)

MARKER = "<conf>"
BYTES = TokenBytes((*(bytes([b]) for b in range(256)), b"<|im_end|>"))
EOS = {256}
PROMPT = Prompt("p", ({"role": "user", "content": "?"},), (), "5", "")


def ids_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8).astype(np.int64)


def response(text: str) -> Response:
    ids = np.append(ids_of(text), 256)
    return Response("p", 0, ids, np.zeros(len(ids)), "stop", 0)


def by_equality(attempts: Sequence[Attempt]) -> list[Outcome]:
    return [Outcome(a.answer == a.truth) for a in attempts]


def sample(text: str) -> Sample:
    return make_sample(problem=text, text=text, answer=text, ground_truth=text)


def report(text: str) -> str:
    row: dict[str, Any] = {
        "prompt_id": "p",
        "problem": text,
        "text": text,
        "ground_truth": text,
        "status": text,
    }
    return render_report([EvaluatedRun("run", Path("nowhere"), None, [], [row])])


class Case(NamedTuple):
    """``run(prepare(text))`` is timed without ``prepare``; no text is longer than ``longest``."""

    run: Callable[[Any], Any]
    prepare: Callable[[str], Any] = str
    longest: int = LENGTHS[-1]


CASES: dict[str, Case] = {
    "split_text boxed": Case(lambda text: split_text(text, MARKER, BOXED)),
    "split_text fenced": Case(lambda text: split_text(text, MARKER, FENCED)),
    "judge ids boxed": Case(
        lambda r: judge(r, PROMPT, BYTES, EOS, verifier=by_equality), response, 50_000
    ),
    "judge ids fenced": Case(
        lambda r: judge(r, PROMPT, BYTES, EOS, verifier=by_equality, form=FENCED), response, 50_000
    ),
    "with_text": Case(lambda r: with_text(r, BYTES, EOS), response, 50_000),
    "extract_boxed": Case(extract_boxed),
    "extract_program": Case(extract_program),
    "read_answer": Case(read_answer),
    "parse_confidence": Case(lambda text: parse_confidence(text, finished=True)),
    "quick_verdict of an answer": Case(lambda text: quick_verdict(text, "x+1")),
    "quick_verdict of a key": Case(lambda text: quick_verdict("x+1", text)),
    "plain_text.spell_out": Case(plain_text.spell_out, longest=8_000),
    "measured": Case(words.measured, longest=8_000),
    "chosen_letter": Case(
        lambda text: chosen_letter(text, ["Paris", "1/2", "b) x"]), longest=8_000
    ),
    "chosen_letter without options": Case(lambda text: chosen_letter(text, ()), longest=8_000),
    "chosen_letter of long options": Case(
        lambda text: chosen_letter("b) x", [text, text[1:]]), longest=8_000
    ),
    "normalize": Case(normalize),
    "normalize_triviaqa": Case(normalize_triviaqa),
    "normal_form": Case(normal_form, longest=19_000),
    "bare_problem": Case(bare_problem),
    "box_instruction": Case(box_instruction),
    "final_answer": Case(final_answer),
    "final_answer, whole number": Case(lambda text: final_answer(text, integer=True)),
    "sample_line": Case(sample_line, sample),
    "report": Case(report, longest=25_000),
    "reply of a server": Case(
        lambda row: response_of_choice("p", 0, row, "chat"),
        lambda text: {"message": {"content": text}, "finish_reason": "stop"},
    ),
    "parse_json": Case(parse_json, json.dumps),
    "parse_json of anything": Case(lambda text: _or_error(parse_json, text)),
    "printable": Case(printable),
    "encodable": Case(encodable),
    "one_line": Case(one_line),
}


def _or_error(function: Callable[[str], Any], text: str) -> Any:
    try:
        return function(text)
    except ValueError as error:
        return error


def seconds(case: Case, argument: Any, repetitions: int) -> float:
    """The least processor time of a call."""
    best = math.inf
    for _ in range(repetitions):
        begin = time.thread_time()
        case.run(argument)
        best = min(best, time.thread_time() - begin)
        if best > HOPELESS_SECONDS:
            break
    return best


def growth(case: Case, maker: Callable[[int], str]) -> float:
    """The exponent between the two longest texts, 0 where even the longest takes next to nothing;
    infinite where a short text takes more than ``HOPELESS_SECONDS``.
    """
    lengths = [length * case.longest // LENGTHS[-1] for length in LENGTHS]
    for length in lengths[:-1]:
        before = seconds(case, case.prepare(maker(length)), 1)
        if before > HOPELESS_SECONDS:
            return math.inf
    longest, shorter = (case.prepare(maker(length)) for length in (lengths[-1], lengths[-2]))
    last = seconds(case, longest, 1)
    if last < NOISE_SECONDS:
        return 0.0
    exponent = math.inf
    for again in range(6):  # a busy machine makes single timings longer, never shorter
        before = min(before, seconds(case, shorter, 3))
        if again:
            last = min(last, seconds(case, longest, 2))
        exponent = math.log(last / max(before, 1e-9)) / math.log(lengths[-1] / lengths[-2])
        if exponent < LARGEST_EXPONENT:
            break
    return exponent


def too_steep(case: Case) -> dict[str, float]:
    """The hostile texts on which ``case`` is not linear, with their exponents."""
    gc.collect()
    gc.disable()
    try:
        found = {name: growth(case, maker) for name, maker in HOSTILE.items()}
    finally:
        gc.enable()
    return {
        name: round(exponent, 2) for name, exponent in found.items() if exponent >= LARGEST_EXPONENT
    }


@pytest.mark.parametrize("name", full_only(CASES, ("report",)))
def test_time_grows_with_the_length(name: str) -> None:
    assert not too_steep(CASES[name])


@pytest.mark.full
def test_the_measurement_finds_what_was_cubic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expression that read fences until version 0.1.0: 1,000 blanks took seconds, 2,000 a
    minute.
    """
    before = re.compile(rb"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\r\n]*?)[ \t]*\r?$")
    monkeypatch.setattr(answers, "_OPENING", before)
    maker = HOSTILE["fence, blanks, backtick"]
    assert growth(CASES["extract_program"], maker) >= LARGEST_EXPONENT
    # and a quadratic one: greedy where the real one is possessive
    monkeypatch.setattr(answers, "_OPENING", re.compile(rb"([ \t]*)(`{3,}|~{3,})([^`\r\n]*)\r?$"))
    assert growth(CASES["extract_program"], HOSTILE["tildes, backtick"]) >= LARGEST_EXPONENT
