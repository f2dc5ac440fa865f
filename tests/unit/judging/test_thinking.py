r"""Where a thinking ends and the answer begins: on ids and text alike, and nothing of the thinking
is read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluate import AnswerJudge, rejudge
from megatron_dcpo.judging.answers import BOXED, FENCED, FREE, Attempt, Outcome
from megatron_dcpo.judging.blocks import split_blocks, split_text
from megatron_dcpo.judging.judge import with_text
from megatron_dcpo.judging.thinking import (
    KNOWN,
    answer_start,
    check_thinking,
    find_tags,
    keep_thinking,
)
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.objectives import ObjectiveConfig, build_method
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.types import (
    BLOCK_CONFIDENCE,
    BLOCK_REASONING,
    Judgement,
    Prompt,
    Response,
    TrainingSample,
)
from tests.helpers.evaluated import make_sample
from tests.helpers.judging import judge_many
from tests.helpers.tokenizers import EOS, byte_level, save_qwen3, table_of

THINK = KNOWN[0]
END, OPEN, CLOSE = 256, 257, 258
BYTES = TokenBytes((*(bytes([b]) for b in range(256)), EOS.encode(), *THINK), THINK)
PLAIN = TokenBytes(BYTES.table)
ANSWER = "\\boxed{7}\n<conf> Confidence: 0.8"


def ids_of(text: str) -> list[int]:
    """Return a token per byte, and one for each tag."""
    ids: list[int] = []
    while text:
        tag = next((n for n, tag in enumerate(THINK) if text.startswith(tag.decode())), None)
        if tag is None:
            ids += text[0].encode()
        else:
            ids.append(OPEN + tag)
        text = text[1:] if tag is None else text[len(THINK[tag]) :]
    return ids


def equal(attempts: list[Attempt]) -> list[Outcome]:
    return [Outcome(attempt.answer == attempt.truth) for attempt in attempts]


def judged(
    text: str, prompt: str = "", ended: bool = True, form: Any = BOXED, tokens: TokenBytes = BYTES
) -> Judgement:
    """Judge by ids, and by text; both say the same."""
    ids = np.array([*ids_of(text), *[END] * ended], np.int64)
    response = Response(
        "p", 0, ids, np.zeros(len(ids), np.float32), "stop" if ended else "length", 0
    )
    prompts = {"p": Prompt("p", (), tuple(ids_of(prompt)), "7", "")}
    texts = [response, with_text(response, tokens, {END})]
    by_ids, by_text = judge_many(texts, prompts, tokens, {END}, verifier=equal, form=form)
    assert by_ids == by_text
    assert by_ids.answer == by_text.answer
    return by_ids


CASES = [
    # text, end of the prompt, ended; answer, status, tokens of thinking
    (f"<think>try \\boxed{{1}} <conf> 0.1</think>{ANSWER}", "", True, "7", "ok", 26),
    (f"try \\boxed{{1}}</think>{ANSWER}", "<think>\n", True, "7", "ok", 14),
    (
        f"try \\boxed{{1}}</think>{ANSWER}",
        "",
        True,
        "7",
        "ok",
        14,
    ),  # the template opened it, unseen by us
    (f" \n<think>\n</think>\n{ANSWER}", "", True, "7", "ok", 5),  # empty
    (ANSWER, "", True, "7", "ok", 0),  # no thinking
    (ANSWER, "<think>\n\n</think>\n\n", True, "7", "ok", 0),  # thinking off
    (f"\\boxed{{1}}</think>{ANSWER}", "<think>\n\n</think>\n\n", True, "7", "ok", 0),
    (
        "\\boxed{7}</think> so <conf> 0.8",
        "<think>\n\n</think>\n\n",
        True,
        "7",
        "ok",
        0,
    ),  # ended before: all is answer
    ("<think>\\boxed{7} <conf> 0.8", "", True, None, "missing", 21),
    ("<think>\\boxed{7} <conf> 0.8", "", False, None, "truncated", 21),
    ("\\boxed{7} <conf> 0.8", "<think>\n", False, None, "truncated", 20),
    ("\\boxed{7} <conf> 0.8", "<think>\n", True, None, "missing", 20),
    ("", "<think>", True, None, "missing", 0),
    ("</think>", "<think>", True, None, "missing", 1),
    (
        f"<think>a</think>\\boxed{{1}}</think>{ANSWER}",
        "",
        True,
        "7",
        "ok",
        3,
    ),  # two: the first ends it
    ("<think>a</think>\\boxed{7}</think><conf> 0.8", "", True, "7", "ok", 3),
    (f"<think>a</think>{ANSWER} <conf> 0.8", "", True, "7", "multiple", 3),
    (f"<think>a</think>{ANSWER}", "", False, "7", "truncated", 3),
    ("Say <think>: \\boxed{7}\n<conf> 0.8", "", True, "7", "ok", 0),  # talked of, not opened
]


@pytest.mark.parametrize(("text", "prompt", "ended", "answer", "status", "thinking"), CASES)
def test_the_answer_is_read_behind_the_thinking(
    text: str, prompt: str, ended: bool, answer: str | None, status: str, thinking: int
) -> None:
    judgement = judged(text, prompt, ended)
    assert (judgement.answer, judgement.status, judgement.thinking_tokens) == (
        answer,
        status,
        thinking,
    )
    assert judgement.answered == (answer is not None)
    assert judgement.correct == float(answer == "7")
    assert judgement.confidence == (0.8 if status == "ok" else None)
    hidden = text.encode()[: len("".join(text)[: judgement.thinking_characters].encode())]
    assert len(ids_of(hidden.decode())) == thinking
    if judgement.status == "ok":  # the marker behind the last box, in tokens
        assert judgement.boundary == len(ids_of(text[: text.rindex("<conf>")]))
    if status in ("missing", "truncated") and answer is None:
        assert judgement.boundary == judgement.length - ended, (
            "the end token alone is the confidence block"
        )


@pytest.mark.parametrize(("text", "prompt", "ended", "answer", "status", "thinking"), CASES)
def test_without_an_end_of_thinking_token_nothing_changes(
    text: str, prompt: str, ended: bool, answer: str | None, status: str, thinking: int
) -> None:
    judgement = judged(text, prompt, ended, tokens=PLAIN)
    assert (judgement.thinking_tokens, judgement.thinking_characters) == (0, 0)
    ids = [*ids_of(text), *[END] * ended]
    split = split_blocks(ids, PLAIN, {END}, "<conf>")
    assert (split.start, split.answer) == (0, split.content)
    assert judgement.boundary == split.boundary
    assert judgement.answered == ("\\boxed" in split.reasoning.decode())


def test_programs_are_read_after_the_thinking() -> None:
    tried, final = "```python\n1\n```\n<conf> 0.1", "```python\n7\n```\n<conf> 0.8"
    for text, prompt in (
        (f"<think>{tried}</think>{final}", ""),
        (f"{tried}</think>{final}", "<think>\n"),
    ):
        judgement = judged(text, prompt, form=FENCED)
        assert (judgement.answer, judgement.status, judgement.correct) == ("7", "ok", 1)
    unfinished = judged(f"<think>{final}", form=FENCED)
    assert (unfinished.answer, unfinished.answered, unfinished.status) == (None, False, "missing")


def test_a_verifier_gets_the_text_behind_the_thinking() -> None:
    seen: list[Attempt] = []

    def verify(attempts: Any) -> list[Outcome]:
        seen.extend(attempts)
        return equal(attempts)

    texts = ["<think>no \\boxed{1}</think>It is 7.\n<conf> 0.8", "<think>It is 7.\n<conf> 0.8"]
    responses = [
        Response("p", n, np.array([*ids_of(t), END]), np.zeros(1), "stop", 0)
        for n, t in enumerate(texts)
    ]
    found = judge_many(
        responses, {"p": Prompt("p", (), (), "7", "")}, BYTES, {END}, verifier=verify, form=FREE
    )
    assert [attempt.reasoning for attempt in seen] == ["It is 7.\n", ""]
    assert [judgement.answered for judgement in found] == [True, False]


@pytest.mark.parametrize(("text", "prompt", "ended", "answer", "status", "thinking"), CASES)
def test_judged_again_from_the_sample_alone(
    text: str, prompt: str, ended: bool, answer: str | None, status: str, thinking: int
) -> None:
    """By the characters that the sample keeps: neither tokenizer nor prompt is needed."""
    judgement = judged(text, prompt, ended)
    sample = make_sample(
        text=text,
        ground_truth="7",
        finish_reason="stop" if ended else "length",
        thinking_characters=judgement.thinking_characters,
    )

    def judge(responses: Any, prompts: Any) -> Any:
        return judge_many(responses, prompts, verifier=equal)

    (sample_again,) = rejudge([sample], AnswerJudge(judge, lambda a, b: a == b))
    again = sample_again.judgement
    assert (again.answer, again.status, again.correct) == (answer, status, float(answer == "7"))
    assert again.confidence == judgement.confidence


pieces = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "\\boxed{7}",
            "\\boxed{1}",
            "<conf> 0.5",
            "<conf>",
            "\n",
            "数",
            "<",
            "/think>",
        ]
    ),
    max_size=12,
).map("".join)


@given(
    text=pieces,
    prompt=st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
    ended=st.booleans(),
)
@example(text="<think>\\boxed{1}<conf></think>\\boxed{7}<conf> 0.5", prompt="", ended=True)
def test_blocks_partition_and_nothing_of_the_thinking_is_read(
    text: str, prompt: str, ended: bool
) -> None:
    judgement = judged(text, prompt, ended)
    assert (
        0
        <= (judgement.thinking_tokens or 0)
        <= judgement.boundary
        <= judgement.marker_end
        <= judgement.length
    )
    hidden = judgement.thinking_characters
    rest = judged(text[hidden:], "</think>", ended)  # alone, behind a thinking that has ended
    same = ("answer", "correct", "status", "confidence", "stated", "abstained")
    assert [getattr(judgement, name) for name in same] == [getattr(rest, name) for name in same]
    assert judgement.boundary == rest.boundary + (judgement.thinking_tokens or 0)
    assert prompt != "<think>\n\n</think>\n\n" or hidden == 0
    if 0 < hidden < len(text):
        assert text[:hidden].endswith("</think>")
        assert text[:hidden].count("</think>") == 1


def test_ids_that_spell_the_token_are_the_token() -> None:
    """As the confidence tag is found: a text has one end, however it was sampled."""
    text = f"<think>\\boxed{{1}}</think>{ANSWER}"
    for ids in ([*text.encode(), END], [*ids_of(text), END]):
        response = Response("p", 0, np.array(ids), np.zeros(len(ids)), "stop", 0)
        (judgement,) = judge_many(
            [response], {"p": Prompt("p", (), (), "7", "")}, BYTES, {END}, verifier=equal
        )
        assert (judgement.answer, judgement.confidence, judgement.thinking_characters) == (
            "7",
            0.8,
            24,
        )


def test_both_parts_are_trained() -> None:
    """Thinking and answer up to the marker carry A_r, the confidence A_c: no token is left out."""
    samples = []
    for n, (tried, boxed, stated) in enumerate(
        (("1", "7", "0.9"), ("7", "2", "0.8"), ("1", "1", "0.1"))
    ):
        text = f"<think>\\boxed{{{tried}}}</think>\\boxed{{{boxed}}}\n<conf> Confidence: {stated}"
        ids = np.array([*ids_of(text), END])
        response = Response("p", n, ids, np.zeros(len(ids), np.float32), "stop", 0)
        prompt = Prompt("p", (), (1,), "7", "")
        (judgement,) = judge_many([response], {"p": prompt}, BYTES, {END}, verifier=equal)
        samples.append(TrainingSample(prompt, response, judgement))
    scored = build_method(ObjectiveConfig(name="dcpo")).score(samples)
    assert [sample.R for sample in scored] == [1, 0, 0]
    for sample in scored:
        boundary, length = sample.judgement.boundary, sample.judgement.length
        assert boundary is not None
        assert sample.block_ids.tolist() == [BLOCK_REASONING] * boundary + [BLOCK_CONFIDENCE] * (
            length - boundary
        )
        thinking, reasoning = (sample.judgement.thinking_tokens, set(sample.advantages[:boundary]))
        assert len(reasoning) == 1
        assert 0 not in reasoning
        assert thinking == len(ids_of("<think>\\boxed{1}</think>"))
        assert (sample.weights > 0).all()


def test_tokens_of_known_tokenizers() -> None:
    assert find_tags({"</think>", "<think>", EOS}) == KNOWN[0]
    assert find_tags({"[THINK]", "[/THINK]"}) == KNOWN[1]
    assert find_tags({EOS, "<think>"}) is None
    assert table_of(byte_level).thinking is None
    toy = Tokenizer.from_str(byte_level().to_str())
    toy.add_tokens([AddedToken(tag.decode()) for tag in KNOWN[1]])
    assert token_bytes(toy).thinking == KNOWN[1]


def test_on_without_the_token_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"thinking=on: .*MODEL.*</think>"):
        check_thinking("on", None, "MODEL")
    for wanted, tags in (("on", THINK), ("off", None), ("auto", None)):
        check_thinking(wanted, tags, "MODEL")


def test_the_tokens_of_qwen3(tmp_path: Path) -> None:
    """The real tokenizer: one token each; ids and text have the same boundary, with and without
    thinking.
    """
    tokenizer = load_tokenizer(save_qwen3(tmp_path))
    tokens, end = token_bytes(tokenizer), tokenizer.convert_tokens_to_ids(EOS)
    assert tokens.thinking == THINK
    assert keep_thinking(tokenizer, tokens.thinking) == {}, (
        "no special tokens: servers keep them in the text"
    )
    thinking = "<think>\nIs it \\boxed{1}? <conf> No.\n</think>"
    prompt = {"role": "user", "content": "3 + 4?"}
    for switch, text in ((True, f"{thinking}\n\n{ANSWER}"), (False, ANSWER), (True, thinking[:-8])):
        asked = tokenizer.apply_chat_template(
            [prompt], tokenize=False, add_generation_prompt=True, enable_thinking=switch
        )
        before = tuple(tokenizer.encode(asked, add_special_tokens=False))
        ids = np.array([*tokenizer.encode(text, add_special_tokens=False), end])
        response = Response("p", 0, ids, np.zeros(len(ids), np.float32), "stop", 0)
        prompts = {"p": Prompt("p", (), before, "7", "")}
        both = [response, with_text(response, tokens, {end})]
        by_ids, by_text = judge_many(both, prompts, tokens, {end}, verifier=equal)
        assert by_ids == by_text
        assert by_ids.answer == (None if text == thinking[:-8] else "7")
        count = len(tokenizer.encode(thinking, add_special_tokens=False))
        assert by_ids.thinking_tokens == (
            len(ids) - 1 if by_ids.answer is None else count if switch else 0
        )
        assert tokenizer.decode(ids[: by_ids.boundary]) == text.removesuffix(
            "<conf> Confidence: 0.8"
        )


def test_a_special_token_is_asked_for() -> None:
    magistral = SimpleNamespace(
        added_tokens_decoder={
            n: AddedToken(tag.decode(), special=True) for n, tag in enumerate(KNOWN[1])
        }
    )
    assert keep_thinking(magistral, KNOWN[1]) == {"skip_special_tokens": False}
    assert keep_thinking(None, KNOWN[0]) == {}


def test_text_whose_tokens_are_not_known() -> None:
    text = f"<think>\\boxed{{1}}</think>{ANSWER}"
    split = split_text(text, "<conf>", find_start=lambda content: answer_start(content, THINK))
    assert (split.reasoning, split.thinking, split.boundary) == (b"\\boxed{7}\n", None, None)
    none = np.empty(0)
    server = Response("p", 0, none, none, "stop", 0, text=text)
    prompts = {"p": Prompt("p", (), (), "7", "")}
    (judgement,) = judge_many([server], prompts, TokenBytes((), THINK), verifier=equal)
    assert (judgement.answer, judgement.confidence, judgement.thinking_tokens) == ("7", 0.8, None)
    (plain,) = judge_many(
        [replace(server, text=ANSWER)], prompts, TokenBytes((), THINK), verifier=equal
    )
    assert (plain.answer, plain.thinking_tokens) == ("7", 0)
