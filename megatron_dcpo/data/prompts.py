r"""From a problem to the tokens a policy continues: one template function for training and for
evaluation.

- ``paper``: the problem, box the answer, and one last line ``<conf> Confidence: 0.83`` (the
  confidence prompt of DCPO);
- ``abstain``: the same, with the leave to box ``I don't know`` instead of an answer (for
  ``objective.name: ternary``);
- ``forecast``: a question about what happens, and one last line ``<conf> Confidence: 0.83``, the
  probability of yes (docs/bring_your_own.md#forecasts);
- ``grpo``: the problem, and box the answer (the prompt of the GRPO baseline);
- ``chat``: the problem text alone, through the chat template, for a model that was taught the
  format;
- ``raw``: the problem text alone, without chat template, for base models and for tasks that bring
  their own format;
- ``my_prompt.py:render``: a user's function: ``render(problem, marker)`` gives the user turn, or
  all messages (CONTRIBUTING.md).

What ``paper``, ``abstain`` and ``grpo`` ask for depends on the form of the answer (:data:`ASKS`):
an answer in a box, the letter of an option, a short answer, or one fenced program.

All but ``raw`` go through the tokenizer's chat template with its generation prompt, without a
system message of ours, and with thinking switched off, or on, where the template has that switch
(Qwen3).
"""

from __future__ import annotations

import datetime
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_dcpo.data.chat_template import (
    ChatSwitches,
    PromptError,
    check_unwritten,
    check_written,
    in_template_words,
    report_thinking,
    write_chat,
)
from megatron_dcpo.data.chats import TEMPLATE_KEYS, Message, Messages
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.plugins import check_signature, is_import_path, load_object
from megatron_dcpo.types import CONFIDENCE_TAG

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The newline before the marker matters: without it byte-level BPE merges the end of the answer with
# the marker ("}<").
_CONFIDENCE_LINE = (
    "the marker {marker} and a decimal number between 0 and 1, where 0 means that you have no idea "
    "and 1 means that you are certain. That line must have exactly this form:\n"
    "{marker} Confidence: 0.83\nWrite nothing after it."
)
_CONFIDENCE = (
    "After the boxed answer, start a new line and say how sure you are that this answer is "
    f"correct: {_CONFIDENCE_LINE}"
)
_PROGRAM_CONFIDENCE = (
    "After the closing ```, start a new line and say how sure you are that the program passes "
    f"every test: {_CONFIDENCE_LINE}"
)
_PROBABILITY = (
    "Please reason step by step about how likely it is. Then start a new line and give the "
    "probability that it is so: the marker {marker} and a decimal number between 0 and 1. That "
    "line must have exactly this form:\n{marker} Confidence: 0.83\nWrite nothing after it."
)
ASKS: Mapping[str, str] = MappingProxyType(
    {
        "math": r"Please reason step by step, and put your final answer within \boxed{}.",
        "choice": r"Please reason step by step, and put the letter of the right option within "
        r"\boxed{}.",
        "short": r"Please reason step by step, and put your final answer, a name or a few words, "
        r"within \boxed{}.",
        "code": "Please reason step by step, and then give your whole program in Python in one "
        "block that begins with "
        "```python and ends with ```.",
    }
)
_ABSTAIN = r"If you do not know the answer, do not guess: put \boxed{I don't know}."
_ASKS_FOR_BOX = re.compile(r"\\boxed\{\s*\}[^\n]{0,40}\Z")
# The suffix of the reference's ``..._with_confidence`` files asks for another marker; both would
# contradict each other.
_REFERENCE_LINE = re.compile(r"Also output a sing\w+ line")
_REFERENCE_BOX = r"Please put your final answer within \boxed{}."


@dataclass(frozen=True)
class Template:
    """How a problem is put: ``instruct(problem, marker, form)`` writes the user turn, or all
    messages, for an answer of a ``form`` of :data:`ASKS`; ``chat`` applies the chat template.
    """

    name: str
    instruct: Callable[[str, str, str], str | Sequence[Message]]
    chat: bool


def box_instruction(problem: str, marker: str = CONFIDENCE_TAG, form: str = "math") -> str:
    """Ask for the answer, unless the problem ends by asking for a box already."""
    problem = problem.rstrip()
    asked = form != "code" and _ASKS_FOR_BOX.search(problem)
    return problem if asked else f"{problem}\n\n{ASKS[form]}"


def confidence_instruction(
    problem: str, marker: str = CONFIDENCE_TAG, form: str = "math", more: str = ""
) -> str:
    """Ask for the answer, for ``more``, and then for the confidence line."""
    confidence = _PROGRAM_CONFIDENCE if form == "code" else _CONFIDENCE
    return f"{box_instruction(problem, form=form)}{more}\n\n{confidence.format(marker=marker)}"


def abstention_instruction(problem: str, marker: str = CONFIDENCE_TAG, form: str = "math") -> str:
    """Ask for the same, and allow to say in the box that the answer is not known; a program has no
    box.
    """
    return confidence_instruction(problem, marker, form, "" if form == "code" else f"\n{_ABSTAIN}")


def probability_instruction(
    problem: str, marker: str = CONFIDENCE_TAG, form: str = "forecast"
) -> str:
    """Ask for the probability that the problem's statement is true, or that its answer is yes."""
    return f"{problem.rstrip()}\n\n{_PROBABILITY.format(marker=marker)}"


def as_it_is(problem: str, marker: str = CONFIDENCE_TAG, form: str = "math") -> str:
    return problem


TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {
        "paper": Template("paper", confidence_instruction, chat=True),
        "abstain": Template("abstain", abstention_instruction, chat=True),
        "forecast": Template("forecast", probability_instruction, chat=True),
        "grpo": Template("grpo", box_instruction, chat=True),
        "chat": Template("chat", as_it_is, chat=True),
        "raw": Template("raw", as_it_is, chat=False),
    }
)


# those whose words fit one kind of row; the others leave the problem as it is
_OF_OUR_WORDS = ("paper", "abstain", "grpo", "forecast")


def find_template(name: str) -> Template:
    """Return the template ``name``: a key of :data:`TEMPLATES`, or an import path
    (``my_prompt.py:render``) of a function whose attribute ``chat`` may be False. Raises
    :class:`UserError` where there is none.
    """
    if is_import_path(name):
        function = load_object(name, "data.template")
        check_signature(function, name, "data.template", "problem", "marker")
        chat = bool(getattr(function, "chat", True))
        return Template(name, lambda problem, marker, form: function(problem, marker), chat)
    if name not in TEMPLATES:
        raise UserError(
            f"unknown prompt template {name!r}; known: {', '.join(TEMPLATES)}, or "
            "file.py:function of your own"
        )
    return TEMPLATES[name]


def bare_problem(text: str) -> str:
    """Return the problem without the confidence request of the reference's own data files."""
    line = _REFERENCE_LINE.search(text, 0, max(0, text.rfind("CONFIDENCE")))
    return (
        text
        if line is None
        else text[: line.start()].rstrip().removesuffix(_REFERENCE_BOX).rstrip()
    )


def without_box_request(problem: str) -> str:
    """Return the problem without the sentence at its end that asks for a box, as verl's files have
    it.
    """
    request = _ASKS_FOR_BOX.search(problem.rstrip())
    if request is None:
        return problem
    start = max(problem.rfind(mark, 0, request.start()) for mark in ".?!\n") + 1
    return problem[:start].rstrip() or problem


def ask(
    messages: tuple[Message, ...], template: str, marker: str = CONFIDENCE_TAG, form: str = "math"
) -> tuple[Message, ...]:
    """Return the messages as sent. ``messages``: what the data set holds, the problem being the
    last user turn. ``form`` of the answer: a key of :data:`ASKS`.
    """
    if not messages or messages[-1]["role"] != "user":
        raise UserError("a prompt must end with a user message")
    if (form == "forecast") != (template == "forecast") and template in _OF_OUR_WORDS:
        asks = "asks for a probability, and the row has an answer"
        if form == "forecast":
            asks = "asks for an answer, and the row has an outcome; take data.template=forecast"
        raise UserError(f"data.template={template} {asks}")
    instruct = find_template(template).instruct
    problem = bare_problem(messages[-1]["content"])
    try:
        asked = instruct(problem, marker, form)
    except Exception as error:  # of a user's function
        frames = traceback.extract_tb(error.__traceback__)
        raise PromptError(
            f"data.template={template}: {type(error).__name__}: {one_line(error, 200)} "
            f"({frames[-1].filename}, line {frames[-1].lineno})"
        ) from error
    if isinstance(asked, str):
        return (*messages[:-1], {**messages[-1], "content": asked})
    if not _are_messages(asked):
        raise PromptError(
            f"data.template={template}: expected a text or messages with role and content, got "
            f"{asked!r:.60}"
        )
    return tuple(dict(message) for message in asked)


def _are_messages(value: object) -> bool:
    """Return whether ``value`` is a list of messages that ends with a user's turn."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(
            isinstance(m, Mapping) and all(isinstance(m.get(k), str) for k in ("role", "content"))
            for m in value
        )
        and value[-1]["role"] == "user"
    )


def plain_text(messages: tuple[Message, ...]) -> str:
    """Return the messages without a chat template."""
    return "\n\n".join(message["content"] for message in messages)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: tuple[Message, ...],
    template: str,
    marker: str = CONFIDENCE_TAG,
    form: str = "math",
    thinking: str = "off",
    date: datetime.date | None = None,
) -> tuple[tuple[Message, ...], list[int]]:
    """Return the messages as sent and their token ids, ready to be continued. ``thinking``:
    ``data.thinking``; ``date``: that of :func:`encode_chat`.
    """
    asked = ask(messages, template, marker, form)
    return asked, encode(tokenizer, asked, template, ChatSwitches(thinking, date))


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, template: str, switches: ChatSwitches
) -> list[int]:
    """Return the token ids of messages as sent, ready to be continued. Raises :class:`PromptError`
    for what the chat template does not write, and for a text that it has written already.
    """
    if find_template(template).chat:
        check_unwritten(tokenizer, messages)
        token_ids = encode_chat(
            tokenizer, messages, switches.thinking, switches.date, switches.tools
        )
    else:
        token_ids = _encode_raw(tokenizer, messages, switches)
    if not token_ids:
        raise PromptError("the prompt has no tokens: its template writes nothing")
    return token_ids


def _encode_raw(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, switches: ChatSwitches
) -> list[int]:
    keys = [key for message in messages for key in TEMPLATE_KEYS if key in message]
    if switches.tools:
        keys.append("tools")
    if keys:
        raise PromptError(
            f"only a chat template writes {keys[0]}; use another data.template than raw, or remove "
            "it"
        )
    text = plain_text(messages)
    token_ids = list(tokenizer.encode(text))
    first = getattr(tokenizer, "bos_token_id", None)
    # the text brings the first token that the tokenizer adds
    if first is not None and token_ids[:2] == [first, first]:
        token_ids = token_ids[1:]
    last = getattr(tokenizer, "eos_token_id", None)
    # the response goes on behind the text: a tokenizer with add_eos_token would end it
    if token_ids[-1:] == [last] and not text.endswith(str(tokenizer.eos_token)):
        token_ids = token_ids[:-1]
    return token_ids


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: tuple[Message, ...],
    thinking: str = "off",
    date: datetime.date | None = None,
    tools: tuple[dict[str, Any], ...] = (),
) -> list[int]:
    """Return the token ids of a chat up to and including the generation prompt, ``thinking`` off or
    on where the template has that switch, auto: as the template has it. ``date`` is what a template
    writes as the current one (Llama 3.2's ``strftime_now``), today if it is None; ``tools`` are
    what it lists.

    Raises :class:`PromptError`, which names the line of the template, if it cannot be applied, or
    which names what it leaves out.
    """
    switches = ChatSwitches(thinking, date, tools)
    report_thinking(tokenizer, thinking)
    messages = in_template_words(tokenizer, messages)
    check_written(tokenizer, messages, switches, to_answer=True)
    text = write_chat(tokenizer, messages, switches)
    # The template writes the special tokens itself; adding them again would double Llama's
    # <|begin_of_text|>.
    return list(tokenizer.encode(text, add_special_tokens=False))
