"""What a tokenizer's chat template writes: a chat as text, the token that ends a turn, and whether
everything that the messages say is in it.

A template is a program that leaves out silently what it does not know. So a chat is written with
and without each key that means something; a key that changes nothing is refused by its name.
"""

from __future__ import annotations

import datetime
import functools
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_dcpo.data.chats import REASONING, TEMPLATE_KEYS, Message, Messages
from megatron_dcpo.errors import UserError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_LONGEST = 1 << 26  # characters of a chat
_QUESTION, _ANSWER = "What is 1+1?", "It is two."
# openings of turns in other models' templates, which no question begins or ends with
_OPENINGS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "<｜User｜>",
    "[INST]",
    "<s>[INST]",
    "<s> [INST]",
    "<|begin_of_text|>",
    "<bos>",
    "<｜begin▁of▁sentence｜>",
    "[gMASK]",
    "<|user|>",
    "<|system|>",
    "<|start|>",
    "<<SYS>>",
    "<|startoftext|>",
)
# ends of turns in models' templates, with which no answer ends
END_TOKENS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>"),
    *("</s>", "<｜end▁of▁sentence｜>", "<|end|>", "<|user|>", "<|return|>", "<|eom_id|>"),
)
_IS_MARKUP = re.compile(r"[<\[|#]")
_RAW = "data.template=raw takes a prompt as it is"
# The last tokens of a prompt, which may open the thinking, or end it as Qwen3's "off" does.
PROMPT_TOKENS = 32
# what opens and ends the thinking: Qwen3, DeepSeek-R1 and GLM-4.5; Magistral; Seed-OSS
THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
# the variable of a template that switches thinking, and no field of a message
_SWITCH = re.compile(r"(?<![\w.'\"])(?:enable_)?thinking(?![\w'\"(])")


class PromptError(UserError):
    """The prompt of a problem cannot be made: the chat template, or the user's, refuses it."""


@dataclass(frozen=True)
class ChatSwitches:
    """How a template is asked to write: ``thinking`` off, on or auto (``data.thinking``), the
    ``date`` that it writes (None for today's), and the ``tools`` that it lists.
    """

    thinking: str = "off"
    date: datetime.date | None = None
    tools: tuple[dict[str, Any], ...] = ()


class Markup(NamedTuple):
    """What a template writes around the text of a turn: its special ``tokens``, and the ``opening``
    of a user's turn, "" if that may be an ordinary text.
    """

    tokens: tuple[str, ...]
    opening: str


# ------------------------------------------------------------------------------------------ writing


def write_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    switches: ChatSwitches,
    *,
    to_answer: bool = True,
) -> str:
    """Return a chat as the template writes it, followed by the beginning of the assistant's turn
    if it is ``to_answer``. Raises :class:`PromptError`, which names the line of the template, if it
    cannot be applied.
    """
    arguments = _arguments(tokenizer, switches)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=to_answer, **arguments
        )
    except Exception as error:  # a template is a program: it raises anything
        raise PromptError(
            f"the chat template{_line_of_template(error)} cannot be applied: "
            f"{type(error).__name__}: {one_line(error, 200)}"
        ) from error
    assert isinstance(text, str)
    if len(text) > _LONGEST:
        raise PromptError(f"the chat template writes {len(text)} characters for one chat")
    return text


def _arguments(tokenizer: PreTrainedTokenizerBase, switches: ChatSwitches) -> dict[str, Any]:
    chat_template = getattr(tokenizer, "chat_template", None)
    if not chat_template:
        raise UserError(
            "the tokenizer has no chat template; use the prompt template 'raw' or add "
            "chat_template.jinja"
        )
    # A switch that the template does not have is ignored silently; a later release may refuse it.
    arguments: dict[str, Any] = {}
    if switches.thinking != "auto":
        for name in _SWITCH.findall(str(chat_template)):
            arguments[name] = switches.thinking == "on"
    if "strftime_now" in str(chat_template):
        day = switches.date or datetime.date.today()
        midnight = datetime.datetime.combine(day, datetime.time())
        arguments["strftime_now"] = midnight.strftime
    if switches.tools:
        arguments["tools"] = list(switches.tools)
    if isinstance(chat_template, dict) and "default" not in chat_template:
        raise PromptError(
            f"the tokenizer has several chat templates ({', '.join(sorted(chat_template))}) and "
            "none that is called default; rename one, or keep only one"
        )
    return arguments


@functools.lru_cache(maxsize=16)
def report_thinking(tokenizer: PreTrainedTokenizerBase, thinking: str) -> None:
    """Say, once, that the template's prompts are not what ``data.thinking`` wants, since it has no
    switch of the thinking.
    """
    question = ({"role": "user", "content": _QUESTION},)
    try:
        off, on = (write_chat(tokenizer, question, ChatSwitches(one)) for one in ("off", "on"))
    except PromptError:
        return
    thinks = any(on.rstrip().endswith(opening) for opening, _ in THINKING)
    if off == on and thinking != "auto" and thinks != (thinking == "on"):
        logger.warning(
            "data.thinking=%s changes nothing: the chat template has no switch of the thinking, "
            "and its prompts %s it",
            thinking,
            "open" if thinks else "do not open",
        )


def _line_of_template(error: Exception) -> str:
    """Return ``, line N`` of the template for an error of Jinja's parser or of the template's code,
    "" for any other.
    """
    line = getattr(error, "lineno", None)  # of a syntax error
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in ("<template>", "<unknown>"):
            line = frame.lineno
    return "" if line is None else f", line {line},"


def in_template_words(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Messages:
    """Return the messages with their reasoning under the name that the template reads."""
    template = str(getattr(tokenizer, "chat_template", None))
    names = [name for name in REASONING if re.search(rf"\b{name}\b", template)]
    renamed = []
    for message in messages:
        own = next((name for name in REASONING if name in message), None)
        if own is not None and names and own not in names:
            message = {**message, names[0]: message[own]}
            del message[own]
        renamed.append(message)
    return tuple(renamed)


# ------------------------------------------------------------------------------------------- checks


def check_written(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    switches: ChatSwitches,
    *,
    to_answer: bool,
) -> None:
    """Raise :class:`PromptError` for what the messages or the tools say and the template does not
    write.
    """

    def written(chat: Messages, how: ChatSwitches = switches) -> str | None:
        try:
            return write_chat(tokenizer, chat, how, to_answer=to_answer)
        except PromptError:  # the template does not do without it
            return None

    text = write_chat(tokenizer, messages, switches, to_answer=to_answer)
    without_tools = ChatSwitches(switches.thinking, switches.date)
    if switches.tools and text == written(messages, without_tools):
        raise PromptError(
            "the chat template does not write the row's tools; take a tokenizer whose template "
            "does, or remove the column tools"
        )
    for number, message in enumerate(messages):
        before, behind = messages[:number], messages[number + 1 :]
        if not _shows(text, message) and text == written((*before, *behind)):
            raise PromptError(
                f"the chat template leaves out a message of the role {message['role']!r:.40}, "
                f"{message['content']!r:.60}; correct the names in it, or use data.template=raw"
            )
        for key in TEMPLATE_KEYS:
            if key not in message or _is_optional(key, message):
                continue
            other = {name: value for name, value in message.items() if name != key}
            if text != written((*before, other, *behind)):
                continue
            is_earlier = bool(behind) or to_answer
            if not (key in REASONING and is_earlier and _knows(tokenizer, message, key, switches)):
                raise PromptError(
                    f"the chat template does not write {key} of a message, which would be lost; "
                    "put it into the content as the model writes it, or remove it"
                )


def _shows(text: str, message: Message) -> bool:
    """Return whether a chat shows the content of a message; of the assistant's, what is behind its
    thinking, which templates leave out of earlier turns.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = content.rpartition("</think>")[2]
    return _without_space(content) in _without_space(text)


def _is_optional(key: str, message: Message) -> bool:
    """Return whether a key only says which call a result belongs to, which its place says too."""
    return key == "tool_call_id" or (key == "name" and message["role"] in ("tool", "function"))


def _knows(
    tokenizer: PreTrainedTokenizerBase, message: Message, key: str, switches: ChatSwitches
) -> bool:
    """Return whether the template writes a key in the last turn of a chat."""
    user = {"role": "user", "content": _QUESTION}
    last = {"role": message["role"], "content": _ANSWER}
    plain = write_chat(tokenizer, (user, last), switches, to_answer=False)
    with_key = write_chat(tokenizer, (user, {**last, key: message[key]}), switches, to_answer=False)
    return plain != with_key


def _without_space(text: str) -> str:
    return "".join(text.split())


# ------------------------------------------------------------------------------------------ tokens


def check_unwritten(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> None:
    """Raise :class:`PromptError` if a message holds what the chat template writes around it: it was
    written by a template before, and would be again.
    """
    markup = _markup_of(tokenizer)
    for message in messages:
        token = markup_in(tokenizer, message["content"], markup)
        if token:
            raise PromptError(
                f"a message of the role {message['role']!r:.40} holds {token!r:.40}, which a "
                f"chat template writes; {_RAW}; or remove it from the text"
            )


def markup_in(
    tokenizer: PreTrainedTokenizerBase, text: str, markup: Markup | None = None
) -> str | None:
    """Return what a text holds of the markup of the chat template, None if it holds nothing."""
    markup = markup or _markup_of(tokenizer)
    for token in markup.tokens:
        if token in text:
            return token
    first = getattr(tokenizer, "bos_token", None)
    openings = [one for one in (first, markup.opening, *_OPENINGS) if one]
    return next((one for one in openings if text.lstrip().startswith(one)), None)


def end_token_of(text: str) -> str | None:
    """Return the end token, of any model, with which a text ends, None if there is none."""
    return next((end for end in END_TOKENS if text.rstrip().endswith(end)), None)


def _markup_of(tokenizer: PreTrainedTokenizerBase) -> Markup:
    template = getattr(tokenizer, "chat_template", None)
    return _markup(tokenizer, str(template)) if template else Markup((), "")


@functools.lru_cache(maxsize=16)
def _markup(tokenizer: PreTrainedTokenizerBase, template: str) -> Markup:
    """Return the markup of a template, nothing for one that cannot write a question alone."""
    try:
        text = write_chat(tokenizer, ({"role": "user", "content": _QUESTION},), ChatSwitches())
    except PromptError:
        return Markup((), "")
    tokens = special_tokens(tokenizer)
    before = text.partition(_QUESTION)[0]
    for token in tokens:
        before = before.rpartition(token)[2] if token in before else before
    opening = before.strip().rpartition("\n")[2]
    return Markup(
        tuple(token for token in tokens if token in text),
        opening if _IS_MARKUP.search(opening) else "",
    )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the texts of the special tokens, longer ones first."""
    names = {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
    for token in getattr(tokenizer, "added_tokens_decoder", {}).values():
        if getattr(token, "special", False):
            names.add(str(token))
    return tuple(sorted((name for name in names if name.strip()), key=lambda one: (-len(one), one)))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that ends a turn of the assistant as the chat template writes it: Gemma's
    ``<end_of_turn>``, ``<|im_end|>``; where it writes none, the one that begins the user's next
    turn (GLM). None for a tokenizer without a template, and for a template without such a token.
    """
    template = getattr(tokenizer, "chat_template", None)
    return _turn_end(tokenizer, str(template)) if template else None


@functools.lru_cache(maxsize=16)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    user = {"role": "user", "content": _QUESTION}
    answer = {"role": "assistant", "content": _ANSWER}
    for chat in ((user, answer), (user, answer, user)):
        try:
            text = write_chat(tokenizer, chat, ChatSwitches(), to_answer=False)
        except UserError:
            continue
        behind = text.rpartition(_ANSWER)[2].partition(_QUESTION)[0] if _ANSWER in text else ""
        first = next(special_tokens_in(tokenizer, behind), None)
        if first is not None:
            token = tokenizer.convert_tokens_to_ids(first)
            return token if isinstance(token, int) else None
    return None


def special_tokens_in(tokenizer: PreTrainedTokenizerBase, text: str) -> Iterator[str]:
    """Yield the special tokens in a text, in their order."""
    tokens = special_tokens(tokenizer)
    if tokens:
        for match in re.finditer("|".join(map(re.escape, tokens)), text):
            yield match[0]


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response as tokenizer and template say: the end of the
    template's own turn, and the tokenizer's end token. Raises :class:`UserError` if there is
    neither.
    """
    ends = (turn_end(tokenizer), tokenizer.eos_token_id)
    known = tuple(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if not known:
        raise UserError(
            "the tokenizer has no end token (eos_token in tokenizer_config.json), with which a "
            "response ends"
        )
    return known


def split_end(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> tuple[str, int]:
    """Return a response without the end tokens that follow it, and the token that ends it: of
    a ``chat``, the end of the template's turn; else the one that the text has, or the tokenizer's
    own.
    """
    ends = end_tokens(tokenizer)
    # some data end with the padding token, which is another model's end
    known = (*ends, getattr(tokenizer, "pad_token_id", None))
    texts = {
        str(tokenizer.convert_ids_to_tokens(end)): end for end in known if isinstance(end, int)
    }
    last = None
    while True:
        name = next((name for name in texts if text.rstrip().endswith(name)), None)
        if name is None:
            break
        last = texts[name]
        text = text.rstrip().removesuffix(name)
    own = tokenizer.eos_token_id
    if chat or not isinstance(own, int):
        return text, ends[0]
    return text, own if last is None else last


def opened_in_prompt(prompt: str, response: str) -> int:
    """Return how many characters of a response the end of its prompt already has: the opening of
    the thinking, which DeepSeek-R1's template writes. Raises :class:`PromptError` if the prompt has
    ended the thinking and the response thinks again, and if the response does not end a thinking
    that it or the prompt has opened.
    """
    before = prompt.rstrip()
    for opening, end in THINKING:
        if before.endswith(end) and end in response:
            raise PromptError(
                f"the response thinks (it holds {end}), and the prompt has ended the thinking; "
                "data.thinking=on (or auto) makes prompts whose answer begins with thinking"
            )
        behind = response.lstrip().removeprefix(opening)
        begins = behind != response.lstrip()
        if (begins or before.endswith(opening)) and end not in response:
            raise PromptError(
                f"{'the response' if begins else 'the prompt'} opens the thinking with {opening}, "
                f"and the response does not end it: no answer would be learned; remove the row, or "
                f"write {end} before its answer"
            )
        if before.endswith(opening) and begins:
            behind = behind.removeprefix(prompt[len(before) :])
            return len(response) - len(behind)
    return 0


def written_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, answer: Message, switches: ChatSwitches
) -> tuple[str, int]:
    """Return a turn of the assistant with reasoning or calls of tools as the template writes it
    behind the prompt, and the token that ends it. Raises :class:`PromptError` if the prompt leaves
    no room for its thinking.
    """
    chat = in_template_words(tokenizer, (*messages, answer))
    check_written(tokenizer, chat, switches, to_answer=False)
    whole = write_chat(tokenizer, chat, switches, to_answer=False)
    prompt = write_chat(tokenizer, chat[:-1], switches)
    thinks = any(key in answer for key in REASONING)
    if not whole.startswith(prompt) and not thinks:
        # the prompt ends with an empty thinking, which the template does not write before a call
        prompt = write_chat(
            tokenizer, chat[:-1], ChatSwitches("auto", switches.date, switches.tools)
        )
    if not whole.startswith(prompt):
        raise PromptError(
            "the prompt does not begin as the turn with its reasoning does; data.thinking=on (or "
            "auto) makes prompts whose answer begins with thinking"
        )
    behind = whole[len(prompt) :]
    ends = list(special_tokens_in(tokenizer, behind))
    last = ends[-1] if ends and behind.rstrip().endswith(ends[-1]) else None
    if last is None:
        return behind, end_tokens(tokenizer)[0]
    token = tokenizer.convert_tokens_to_ids(last)
    assert isinstance(token, int)
    return behind.rstrip().removesuffix(last), token
