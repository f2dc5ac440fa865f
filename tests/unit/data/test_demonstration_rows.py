"""Every shape of a row of dcpo sft: what is read, what is refused by its name, what is counted; and
the tokens at the end of a turn. Rendered by a small template that writes tools and reasoning.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dcpo.data import prompts
from megatron_dcpo.data.chat_template import turn_end
from megatron_dcpo.data.datasets import PromptOptions, load_prompts
from megatron_dcpo.data.demonstrations import Demonstration, load_demonstrations
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.tokens import read_eos_token_ids

CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}"
    "\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"),
    *("<start_of_turn>", "<end_of_turn>", "<bos>"),
)


def tokenizer_with(template: str | None, bos: str | None = None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spec = Tokenizer(models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    spec.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spec.decoder = decoders.ByteLevel()
    spec.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spec, eos_token="<|endoftext|>", bos_token=bos
    )
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = tokenizer_with(CHATML)
CHAT = PromptOptions(template="chat", thinking="auto")
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
PAIR = {"prompt": "2+2?", "response": "4"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": None}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def load(tmp_path: Path, *rows: dict[str, Any], **other: Any) -> list[Demonstration]:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_demonstrations(
        str(path),
        other.get("tokenizer", TOKENIZER),
        other.get("options", CHAT),
        max_length=1000,
        reading=RowOptions(columns=other.get("columns", {})),
    )


def texts(one: Demonstration, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> tuple[str, str]:
    prompt = tokenizer.decode(list(one.prompt.token_ids))
    return str(prompt), str(tokenizer.decode(one.response_ids.tolist()))


def shown(*messages: tuple[str, str]) -> str:
    turns = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return f"{turns}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Say.", "input": "A", "output": "4"}, shown(("user", "Say.\nA"))),
        ({"instruction": "Say.", "input": "", "output": "4"}, shown(("user", "Say."))),
        ({"context": "A", **PAIR}, shown(("user", "A\n\n2+2?"))),
        ({"Context": "A", **PAIR}, shown(("user", "A\n\n2+2?"))),
        # Alpaca's input is no part of its instruction, which may hold the same word
        (
            {"instruction": "Add 2 to it.", "input": "2", "output": "4"},
            shown(("user", "Add 2 to it.\n2")),
        ),
        (
            {"instruction": "Add 2 to it.\n2", "input": "2", "output": "4"},
            shown(("user", "Add 2 to it.\n2")),
        ),
        (
            {"messages": [{"role": "System", "content": "S"}, {**USER, "role": "User"}, ANSWER]},
            shown(("system", "S"), ("user", "2+2?")),
        ),
        ({"system": "S", **PAIR}, shown(("system", "S"), ("user", "2+2?"))),
        ({"system": "S", "messages": [USER, ANSWER]}, shown(("system", "S"), ("user", "2+2?"))),
        ({**PAIR, "options": ["3", "4"]}, shown(("user", "2+2?\n\nA. 3\nB. 4"))),
        ({**PAIR, "answer": "5"}, shown(("user", "2+2?"))),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
            shown(("user", "2+2?")),
        ),
        ({"messages": json.dumps([USER, ANSWER])}, shown(("user", "2+2?"))),
        ({"messages": [USER, {**ANSWER, "finish_reason": "stop"}]}, shown(("user", "2+2?"))),
        ({"messages": repr([USER, ANSWER])}, shown(("user", "2+2?"))),
        ({"prompt": repr([USER]), "completion": json.dumps([ANSWER])}, shown(("user", "2+2?"))),
        ({**PAIR, "tools": [], "image": None, "label": None}, shown(("user", "2+2?"))),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": [], "name": None, "train": True}]},
            shown(("user", "2+2?")),
        ),
    ],
)
def test_what_is_read(tmp_path: Path, row: dict[str, Any], prompt: str) -> None:
    (one,) = load(tmp_path, row)
    assert texts(one) == (prompt, "4<|im_end|>")
    assert set(one.weights.tolist()) == {1.0}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({**PAIR, "answer": "2 and 2 is 4"}, "answer"),
        ({**PAIR, "completion": "5"}, "completion"),
        ({**PAIR, "input": "3"}, "input"),
        ({"instruction": "2+2?", "output": "4", "history": [["1?", "1"]]}, "history"),
        ({**PAIR, "loss": 0}, "loss"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "response"),
        (
            {
                "messages": [{"role": "system", "content": f"You have {[TOOL]}."}, USER, ANSWER],
                "tools": [TOOL],
            },
            "tools",
        ),
        ({**PAIR, "system": "<tools>[]</tools>", "tools": [TOOL]}, "tools"),
        ({**PAIR, "system": json.dumps([TOOL], indent=1), "tools": json.dumps([TOOL])}, "tools"),
        ({**PAIR, "images": ["x.png"]}, "images"),
        ({**PAIR, "functions": [TOOL]}, "functions"),
        ({**PAIR, "label": 1}, "label"),
        (
            {**PAIR, "system": "S", "messages": [{"role": "system", "content": "T"}, USER, ANSWER]},
            "system",
        ),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}]}, "function_call"),
        ({"messages": [{**USER, "name": "Ann"}, ANSWER]}, "name"),
        ({"messages": [USER, {**ANSWER, "images": ["x"]}]}, "images"),
        ({"messages": [{**USER, "train": True}, ANSWER]}, "user"),
        ({"messages": "[{'role': 'user', 'content': '2+2?'"}, "messages"),
        ({"prompt": "[{'role': 'user' 'content'", "response": "4"}, "messages"),
        ({"prompt": "<|im_start|>user\n2+2?<|im_end|>\n", "response": "4"}, "im_start"),
        ({"prompt": "2+2?", "response": "4<|im_end|>\n<|im_start|>user\n3+3?"}, "im_"),
        ({"prompt": "[INST] 2+2? [/INST]", "response": "4"}, "INST"),
        ({"prompt": "2+2?", "response": "4</s>"}, "</s>"),
        ({"prompt": "2+2?", "response": "4<|eot_id|>\n"}, "eot_id"),
        ({**PAIR, "image_url": "x.png"}, "image_url"),
        ({"messages": [USER, {**ANSWER, "learn": False}]}, "learn"),
        ({"messages": [{**USER, "image_url": "x.png"}, ANSWER]}, "image_url"),
        # Nemotron's column, which says whether the response thinks
        ({**PAIR, "reasoning": "on"}, "reasoning"),
        ({"messages": [USER, ANSWER], "reasoning": "Off"}, "reasoning"),
        ({**PAIR, "response": "<think>\n2\n</think>\n\n4", "thinking": "2"}, "reasoning"),
        (
            {"messages": [USER, {**ANSWER, "content": "2</think>4", "reasoning_content": "2"}]},
            "reasoning",
        ),
        ({**PAIR, "response": "<think>\n2 and 2"}, "</think>"),
        ({**PAIR, "weight": 10**400}, "weight"),
        ({"messages": [USER, {**ANSWER, "weight": 10**400}]}, "weight"),
        ({"messages": [USER, {**ANSWER, "finish_reason": "length"}]}, "finish_reason"),
        ({**PAIR, "stop_reason": "max_tokens"}, "stop_reason"),
    ],
)
def test_what_is_refused_by_name(tmp_path: Path, row: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"row 2\b.*{name}"):
        load(tmp_path, PAIR, row)


@pytest.mark.parametrize(
    "row",
    [
        *({"messages": [USER, {**ANSWER, key: False}]} for key in ("train", "loss", "trainable")),
        *({"messages": [USER, {**ANSWER, key: 0}]} for key in ("weight", "loss_mask")),
        {**PAIR, "weight": False},
        {**PAIR, "weight": "False"},
    ],
)
def test_a_turn_that_is_not_to_be_trained_is_left_out(
    tmp_path: Path, row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kept = load(tmp_path, row, PAIR)
    assert [one.prompt.prompt_id for one in kept] == [str(tmp_path.name) + "/2"] or len(kept) == 1
    assert any("weight 0" in message for message in caplog.messages)


def test_the_worked_solution_is_the_response(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"problem": "2+2?", "solution": "2 and 2: \\boxed{4}.", "answer": "4"}
    with caplog.at_level(logging.INFO):
        one, other = load(tmp_path, row, {**row, "solution": ""})
    assert texts(one)[1] == "2 and 2: \\boxed{4}.<|im_end|>"
    assert texts(other)[1] == "4<|im_end|>"
    (line,) = caplog.messages
    for part in ("solution -> response", "answer -> answer", "answer (50 %)"):
        assert part in line
    (short,) = load(tmp_path, row, columns={"response": "answer"})
    assert texts(short)[1] == "4<|im_end|>"


def test_columns_are_named_or_left_out_by_name(tmp_path: Path) -> None:
    row = {**PAIR, "who": "S", "why": "Two.", "system": "T", "label": True}
    (one,) = load(tmp_path, row, columns={"system": "who", "reasoning": "why", "weight": "label"})
    prompt = shown(("system", "S"), ("user", "2+2?"))
    assert texts(one) == (prompt, "<think>\nTwo.\n</think>\n\n4<|im_end|>")
    (one,) = load(
        tmp_path, {**PAIR, "system": "T", "weight": 3}, columns={"system": "", "weight": ""}
    )
    assert texts(one)[0] == shown(("user", "2+2?"))
    assert set(one.weights.tolist()) == {1.0}


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_turn_with_reasoning_is_learned_as_the_template_writes_it(
    tmp_path: Path, key: str
) -> None:
    row = {"messages": [USER, {**ANSWER, key: "Two and two."}]}
    (one,) = load(tmp_path, row)
    assert texts(one)[1] == "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"
    (one,) = load(tmp_path, {**PAIR, key: "Two and two."})
    assert texts(one)[1] == "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"
    with pytest.raises(UserError, match=r"row 1\b.*data\.thinking"):
        load(tmp_path, row, options=PromptOptions(template="chat", thinking="off"))
    with pytest.raises(UserError, match=r"row 1\b.*reasoning|row 1\b.*thinking"):
        load(tmp_path, row, tokenizer=tokenizer_with(GLM))
    with pytest.raises(UserError, match=r"row 1\b.*raw"):
        load(tmp_path, row, options=PromptOptions(template="raw"))


THINKS = "<think>\nTwo and two.\n</think>\n\n4"
OPENS = CHATML.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "<think>\n",
)  # as DeepSeek-R1's


@pytest.mark.parametrize("response", [THINKS, "Two and two.\n</think>\n\n4", "\n" + THINKS])
def test_a_response_that_thinks_is_refused_behind_a_prompt_that_has_ended_it(
    tmp_path: Path, response: str
) -> None:
    off = PromptOptions(template="chat", thinking="off")
    turns = [USER, {"role": "assistant", "content": response}]
    for row in ({**PAIR, "response": response}, {"messages": turns}):
        with pytest.raises(UserError, match=r"row 1\b.*data\.thinking=on"):
            load(tmp_path, row, options=off)
        (one,) = load(tmp_path, row)
        assert texts(one)[1] == f"{response}<|im_end|>"


@pytest.mark.parametrize("response", [THINKS, THINKS.removeprefix("<think>\n")])
def test_the_opening_of_the_thinking_stands_once(tmp_path: Path, response: str) -> None:
    """It belongs to the prompt; spans still count the characters of the row's response."""
    start = response.index("4")
    span = {"start": start, "end": start + 1, "weight": 3}
    row = {**PAIR, "response": response, "spans": [span]}
    (one,) = load(tmp_path, row, tokenizer=tokenizer_with(OPENS))
    assert texts(one)[0].endswith("<|im_start|>assistant\n<think>\n")
    assert texts(one)[1] == "Two and two.\n</think>\n\n4<|im_end|>"
    assert [weight for weight in one.weights if weight != 1] == [3, 3]


@pytest.mark.parametrize("response", ["4", "<think>\nTwo and two."])
def test_a_thinking_that_is_not_ended_is_refused(tmp_path: Path, response: str) -> None:
    row = {**PAIR, "response": response}
    with pytest.raises(UserError, match=r"row 1\b.*</think>"):
        load(tmp_path, row, tokenizer=tokenizer_with(OPENS))
    row["response"] = "</think>\n\n4"
    (one,) = load(tmp_path, row, tokenizer=tokenizer_with(OPENS))
    assert texts(one)[1] == "</think>\n\n4<|im_end|>"


def test_reasoning_of_an_earlier_turn_is_the_templates_to_leave_out(tmp_path: Path) -> None:
    earlier = {**ANSWER, "reasoning_content": "Two and two."}
    (one,) = load(tmp_path, {"messages": [USER, earlier, USER, ANSWER]})
    assert "Two and two" not in texts(one)[0]


DROPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDS_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if loop.last %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [DROPS_THOUGHTS, ENDS_LAST, CHATML])
def test_the_last_turn_of_a_thinking_chat_is_trained_whole_and_once(
    tmp_path: Path, template: str
) -> None:
    """Where a template writes a turn otherwise once another one follows, a prefix of the chat is
    not the text of the shorter chat.
    """
    turns = [USER, {**ANSWER, "content": THINKS}] * 3
    (one,) = load(tmp_path, {"messages": turns}, tokenizer=tokenizer_with(template))
    prompt, response = texts(one)
    assert response == f"{THINKS}<|im_end|>"
    assert one.weights.tolist() == [1.0] * len(one.response_ids)
    assert prompt.count("Two and two.") == (0 if template == DROPS_THOUGHTS else 2)
    assert prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), TOOL])
@pytest.mark.parametrize("thinking", ["auto", "off"])
def test_tools_and_calls_are_what_the_template_writes(
    tmp_path: Path, tools: object, thinking: str
) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    (one,) = load(
        tmp_path,
        {"tools": tools, "messages": [USER, turn]},
        options=PromptOptions(template="chat", thinking=thinking),
    )
    prompt, response = texts(one)
    assert '{"type": "function", "function": {"name": "weather", "parameters": {}}}' in prompt
    written = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert response == f"{written}<|im_end|>"
    result = {"role": "tool", "content": "18 C", "tool_call_id": "1", "name": "weather"}
    (one,) = load(tmp_path, {"tools": tools, "messages": [USER, turn, result, ANSWER]})
    assert written in texts(one)[0]
    for row in ({"tools": tools, "messages": [USER, ANSWER]}, {"messages": [USER, turn]}):
        with pytest.raises(UserError, match=r"row 1\b.*tool"):
            load(tmp_path, row, tokenizer=tokenizer_with(GLM))


# ------------------------------------------------------------------------------------------ tokens
@pytest.mark.parametrize("ending", ["", "<|im_end|>", "<|im_end|>\n", "<|im_end|><|endoftext|>"])
def test_one_end_token_is_learned(tmp_path: Path, ending: str) -> None:
    (one,) = load(tmp_path, {**PAIR, "response": f"4{ending}"})
    assert texts(one)[1] == "4<|im_end|>"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (GEMMA, "<end_of_turn>"),
        (GLM, "<|user|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "<|endoftext|>"),
    ],
)
def test_the_end_of_the_templates_turn_is_taught_and_stops_engines(
    tmp_path: Path, template: str, end: str
) -> None:
    tokenizer = tokenizer_with(template)
    (one,) = load(tmp_path, PAIR, tokenizer=tokenizer)
    assert texts(one, tokenizer)[1] == f"4{end}"
    tokenizer.save_pretrained(tmp_path / "model")
    known = read_eos_token_ids(tmp_path / "model")
    assert tokenizer.convert_tokens_to_ids(end) in known
    assert tokenizer.eos_token_id in known
    assert turn_end(tokenizer_with(None)) is None


def test_the_first_token_of_a_raw_prompt_is_there_once() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(GEMMA, bos="<bos>")
    first = tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", first)]
    )
    message = {"role": "user", "content": "<bos>2+2?"}
    _, ids = prompts.render(tokenizer, (message,), "raw")
    assert ids.count(first) == 1
    _, ids = prompts.render(tokenizer, ({**message, "content": "2+2?"},), "raw")
    assert ids.count(first) == 1
    with pytest.raises(prompts.PromptError):
        prompts.render(tokenizer, (message,), "chat")


def test_a_raw_prompt_has_no_end_token_that_its_text_does_not_have() -> None:
    """A tokenizer with add_eos_token: true adds one."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with(None)
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    _, ids = prompts.render(tokenizer, (USER,), "raw")
    assert tokenizer.decode(ids) == "2+2?"


# ---------------------------------------------------------------------------------------------- RL
def prompt_of(tmp_path: Path, row: dict[str, Any], **other: Any) -> str:
    path = tmp_path / "rl.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (prompt,) = load_prompts(str(path), TOKENIZER, CHAT, **other)
    return str(TOKENIZER.decode(list(prompt.token_ids)))


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [USER]}, shown(("user", "2+2?"))),
        ({"prompt": json.dumps([USER])}, shown(("user", "2+2?"))),
        (
            {"prompt": repr([{"role": "system", "content": "S"}, USER])},
            shown(("system", "S"), ("user", "2+2?")),
        ),
        ({"conversations": [{"from": "human", "value": "2+2?"}]}, shown(("user", "2+2?"))),
        ({"problem": "2+2?", "system": "S"}, shown(("system", "S"), ("user", "2+2?"))),
        (
            {"prompt": [{**USER, "content": [{"type": "text", "text": "2+2?"}]}]},
            shown(("user", "2+2?")),
        ),
        ({"problem": "2+2?", "messages": [USER, ANSWER]}, shown(("user", "2+2?"))),
        ({"prompt": json.dumps([{"id": 1, **USER}])}, shown(("user", "2+2?"))),
        ({"prompt": json.dumps([{"weight": None, **USER}])}, shown(("user", "2+2?"))),
        ({"prompt": json.dumps(json.dumps([USER]))}, shown(("user", "2+2?"))),
        ({"problem": "2+2=4, so 2+2?", "input": "2+2"}, shown(("user", "2+2=4, so 2+2?"))),
        ({"problem": "(a role, from 1) 2+2?"}, shown(("user", "(a role, from 1) 2+2?"))),
    ],
)
def test_prompts_of_rl_are_chats_too(tmp_path: Path, row: dict[str, Any], prompt: str) -> None:
    assert prompt_of(tmp_path, {**row, "answer": "4"}) == prompt


def test_prompts_of_rl_list_their_tools(tmp_path: Path) -> None:
    assert '"weather"' in prompt_of(tmp_path, {"prompt": [USER], "answer": "4", "tools": [TOOL]})


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": "[{'role': 'user', 'content': '2+2?'"}, "messages"),
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"problem": "2+2?", "instruction": "Answer in hex."}, "instruction"),
        ({"problem": "2+2?", "tools": "a hammer"}, "tools"),
        ({"prompt": [USER, {**ANSWER, "function_call": {"name": "f"}}, USER]}, "function_call"),
        ({"prompt": "<|im_start|>user\n2+2?<|im_end|>\n"}, "im_start"),
        ({"prompt": "<s>[INST] 2+2? [/INST]"}, "INST"),
        ({"prompt": "<|begin_of_text|>2+2?"}, "begin_of_text"),
        ({"prompt": json.dumps({"messages": [USER]})}, "messages"),
        ({"problem": "Translate to French.", "input": "cat"}, "'input'"),
        ({"problem": "2+2?", "history": [["1?", "1"]]}, "'history'"),
    ],
)
def test_rows_of_rl_are_refused_by_name(tmp_path: Path, row: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"row 1\b.*{name}"):
        prompt_of(tmp_path, {**row, "answer": "4"})
