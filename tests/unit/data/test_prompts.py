"""The prompt templates: what is asked, how often, and that training and evaluation ask the same."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_dcpo.data import chat_template, prompts
from megatron_dcpo.data.datasets import PromptOptions, Record, message_prompts, render_prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.tokens import load_tokenizer
from tests.helpers.chat_policy import tokenizer as chat_tokenizer
from tests.helpers.paths import QUICKSTART
from tests.helpers.tokenizers import ByteTokenizer, save_qwen3

REFERENCE_SUFFIX = (
    "\n\nPlease put your final answer within \\boxed{}.\n\nAlso output a singal line at the end "
    "of the answer：CONFIDENCE:"
    " <float number between 0 and 1>\ne.g. ：CONFIDENCE: 0.83\nPlease make sure CONFIDENCE part is "
    "in a singal line with"
    " the exact same format.\n"
)


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def text_of(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode()


def test_paper_prompt_asks_for_the_box_and_then_the_confidence_line() -> None:
    messages, ids = prompts.render(ByteTokenizer(), user("What is 2+3?"), "paper")
    content = messages[0]["content"]
    assert content.startswith("What is 2+3?\n\n")
    assert content.count("\\boxed{}") == 1
    assert "\n<conf> Confidence: 0.83\n" in content
    assert content.index("\\boxed{}") < content.index("<conf>")
    assert text_of(ids) == f"<user>{content}<assistant>"
    assert all(
        ord(ch) >= 32 or ch == "\n" for ch in content
    )  # the reference's evaluation prompt had a backspace in it


@pytest.mark.parametrize(
    "problem",
    [
        "Find x. Let's think step by step and output the final answer within \\boxed{}.",
        "Find x.\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ],
)
@pytest.mark.parametrize("template", ["paper", "grpo"])
def test_the_box_is_asked_for_once(problem: str, template: str) -> None:
    messages, _ = prompts.render(ByteTokenizer(), user(problem), template)
    assert messages[0]["content"].count("\\boxed{}") == 1
    assert messages[0]["content"].startswith(problem)
    assert ("<conf>" in messages[0]["content"]) == (template == "paper")


def test_the_request_of_the_reference_files_is_taken_out() -> None:
    problem = "Find x. Let's think step by step and output the final answer within \\boxed{}."
    plain = prompts.render(ByteTokenizer(), user(problem), "paper")
    assert prompts.render(ByteTokenizer(), user(problem + REFERENCE_SUFFIX), "paper") == plain
    assert "CONFIDENCE" not in plain[0][0]["content"]


def test_thinking_is_switched_off_only_where_the_template_knows_it() -> None:
    knows, ignores = ByteTokenizer(), ByteTokenizer("{{ messages }}")
    prompts.render(knows, user("x"), "grpo")
    prompts.render(ignores, user("x"), "grpo")
    assert knows.options == {
        "tokenize": False,
        "add_generation_prompt": True,
        "enable_thinking": False,
    }
    assert ignores.options == {"tokenize": False, "add_generation_prompt": True}


@pytest.mark.parametrize(("thinking", "switch"), [("off", False), ("on", True), ("auto", None)])
def test_thinking_off_on_and_as_the_template_has_it(thinking: str, switch: bool | None) -> None:
    knows, ignores = ByteTokenizer(), ByteTokenizer("{{ messages }}<think>")
    for tokenizer in (knows, ignores):
        prompts.render(tokenizer, user("x"), "paper", thinking=thinking)
    assert knows.options.get("enable_thinking") is switch
    assert "enable_thinking" not in ignores.options
    assert prompts.render(ByteTokenizer(None), user("x"), "raw", thinking=thinking)[1] == [
        256,
        *b"x",
    ]


_CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
_THINKS = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize("thinking", ["off", "on", "auto"])
@pytest.mark.parametrize(
    ("ending", "is_said"),
    [
        ("", {"on"}),
        (_THINKS, {"off"}),
        ("{% if thinking_budget %}<think>{% endif %}", {"on"}),
        ("{% if thinking %}<think>{% endif %}", set()),
        ("{% if not enable_thinking %}<think></think>{% endif %}", set()),
    ],
)
def test_thinking_that_changes_nothing_is_said(
    caplog: pytest.LogCaptureFixture, thinking: str, ending: str, is_said: set[str]
) -> None:
    tokenizer = chat_tokenizer(f"{_CHAT}{ending}{{# {thinking} #}}")
    for _ in range(2):
        prompts.render(tokenizer, user("x"), "chat", thinking=thinking)
    said = [one.getMessage() for one in caplog.records if "data.thinking" in one.getMessage()]
    assert len(said) == (thinking in is_said)


def test_a_template_that_writes_without_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_LONGEST", 1000)
    with pytest.raises(UserError, match="chat template"):
        prompts.render(chat_tokenizer("{{ 'x' * 10000 }}"), user("x"), "chat")


def test_qwen3_with_thinking_off_on_and_auto(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_qwen3(tmp_path))
    ends = {}
    for thinking in ("off", "on", "auto"):
        ids = prompts.render(tokenizer, user("x"), "chat", thinking=thinking)[1]
        ends[thinking] = tokenizer.decode(ids).partition("assistant\n")[2]
    assert ends == {"off": "<think>\n\n</think>\n\n", "on": "", "auto": ""}
    assert prompts.render(tokenizer, user("x"), "chat") == prompts.render(
        tokenizer, user("x"), "chat", thinking="off"
    )


def test_raw_is_the_bare_text_with_the_tokenizers_own_special_tokens() -> None:
    messages, ids = prompts.render(ByteTokenizer(None), user("12*34= "), "raw")
    assert messages == user("12*34= ")
    assert ids == [256, *b"12*34= "]


def test_chat_is_the_bare_text_through_the_chat_template() -> None:
    tokenizer = ByteTokenizer()
    messages, ids = prompts.render(tokenizer, user("12*34= "), "chat")
    assert messages == user("12*34= ")
    assert tokenizer.options["add_generation_prompt"]
    assert 256 not in ids


def test_chat_templates_write_their_special_tokens_themselves() -> None:
    assert 256 not in prompts.render(ByteTokenizer(), user("x"), "paper")[1]


def test_earlier_messages_stay_and_marker_is_configurable() -> None:
    chat = ({"role": "system", "content": "Be brief."}, *user("x"))
    messages, _ = prompts.render(ByteTokenizer(), chat, "paper", marker="[sure]")
    assert messages[0] == chat[0]
    assert "[sure] Confidence: 0.83" in messages[1]["content"]
    assert "<conf>" not in messages[1]["content"]


def with_template(chat_template: Any) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(QUICKSTART / "policy")
    tokenizer.chat_template = chat_template
    return tokenizer


def test_the_date_that_a_template_writes_is_the_one_given() -> None:
    """Llama-3.2-Instruct writes it in its system message."""
    tokenizer = with_template("{{ strftime_now('%d.%m.%Y %H') }} {{ messages[-1].content }}")
    day = datetime.date(2026, 2, 28)
    ids = prompts.encode_chat(tokenizer, user("1+2="), date=day)
    assert tokenizer.decode(ids) == "28.02.2026 00 1+2="
    today = prompts.encode_chat(tokenizer, user("1+2="))
    assert str(datetime.date.today().year) in tokenizer.decode(today)


SYSTEM = ({"role": "system", "content": "1"}, *user("2"))


@pytest.mark.parametrize(
    ("chat_template", "line"),
    [
        ("a\n{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", 2),
        ("a\n\n{% if %}", 3),
        ("{{ nothing.content }}", 1),
        ("\n{{ messages[1].content + 1 }}", 2),
        ("{{ 1 / 0 }}", 1),
        ({"tool_use": "{{ messages }}"}, None),
        ("{% if false %}x{% endif %}", None),
        ("1{{ mesages }}", None),
    ],
)
def test_a_chat_template_that_cannot_be_applied_is_one_line(
    chat_template: object, line: int | None
) -> None:
    """Also one that writes nothing, or not the problem. The row is named."""
    record = Record("t", 4, SYSTEM, "3")
    with pytest.raises(UserError) as caught:
        render_prompts([record], with_template(chat_template), PromptOptions("chat"), "f.jsonl")
    said = str(caught.value)
    assert said.startswith("f.jsonl: row 5")
    assert "\n" not in said
    assert line is None or f"line {line}" in said


def test_a_users_template_that_raises_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "raising_prompt.py"
    file.write_text("def render(problem, marker):\n    return problem[9]\n")
    record = Record("t", 4, user("x"), "3")
    for render in (
        lambda: render_prompts([record], ByteTokenizer(), PromptOptions(f"{file}:render")),
        lambda: message_prompts([record], f"{file}:render"),
    ):
        with pytest.raises(UserError, match=r"row 5\b.*data\.template=.*IndexError") as caught:
            render()
        assert f"{file}, line 2" in str(caught.value)


def test_errors_name_the_fix() -> None:
    with pytest.raises(UserError, match=r"'papr'.*paper, abstain, forecast, grpo, chat, raw"):
        prompts.render(ByteTokenizer(), user("x"), "papr")
    with pytest.raises(UserError, match="'raw'"):
        prompts.render(ByteTokenizer(None), user("x"), "paper")
    with pytest.raises(UserError, match=r"\buser\b"):
        prompts.render(ByteTokenizer(), ({"role": "assistant", "content": "x"},), "paper")
