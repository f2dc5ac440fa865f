"""The prompt templates: what is asked, how often, and that training and evaluation ask the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dcpo.data import prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import load_tokenizer
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
    problem = (
        "Find x. Let's think step by step and output the final answer within \\boxed{}."
    )
    plain = prompts.render(ByteTokenizer(), user(problem), "paper")
    assert (
        prompts.render(ByteTokenizer(), user(problem + REFERENCE_SUFFIX), "paper")
        == plain
    )
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


@pytest.mark.parametrize(
    ("thinking", "switch"), [("off", False), ("on", True), ("auto", None)]
)
def test_thinking_off_on_and_as_the_template_has_it(
    thinking: str, switch: bool | None
) -> None:
    knows, ignores = ByteTokenizer(), ByteTokenizer("{{ messages }}<think>")
    for tokenizer in (knows, ignores):
        prompts.render(tokenizer, user("x"), "paper", thinking=thinking)
    assert knows.options.get("enable_thinking") is switch
    assert "enable_thinking" not in ignores.options
    assert prompts.render(ByteTokenizer(None), user("x"), "raw", thinking=thinking)[
        1
    ] == [
        256,
        *b"x",
    ]


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


def test_errors_name_the_fix() -> None:
    with pytest.raises(
        UserError,
        match="unknown prompt template 'papr'; known: paper, abstain, grpo, chat, raw",
    ):
        prompts.render(ByteTokenizer(), user("x"), "papr")
    with pytest.raises(
        UserError, match="no chat template; use the prompt template 'raw'"
    ):
        prompts.render(ByteTokenizer(None), user("x"), "paper")
    with pytest.raises(UserError, match="end with a user message"):
        prompts.render(
            ByteTokenizer(), ({"role": "assistant", "content": "x"},), "paper"
        )
