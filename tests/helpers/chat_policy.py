"""A tokenizer that chats as Qwen3 does, and an engine with it that says what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.types import Prompt, Response, ResponseKey

TEMPLATES = Path(__file__).parent
CHATML = (TEMPLATES / "plain_chat.jinja").read_text()
QWEN3 = (TEMPLATES / "qwen3_chat.jinja").read_text()
END = "<|im_end|>"


@cache
def tokenizer(template: str = QWEN3) -> Any:
    """A token per byte, one for ``ab``, and those of ChatML."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[("a", "b")]
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END), AddedToken("<|im_start|>")])
    for piece in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        backend.add_tokens([AddedToken(piece, special=False, normalized=False)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    made.chat_template = template
    return made


def chat_tokens(template: str = QWEN3, thinking: str = "off") -> ChatTokens:
    made = tokenizer(template)
    return ChatTokens(
        tokenizer=made,
        tokens=token_bytes(made),
        eos_ids=(made.convert_tokens_to_ids(END),),
        thinking=thinking,
    )


def prompt_of(
    messages: Sequence[Mapping[str, Any]], chat: ChatTokens, prompt_id: str = "p"
) -> Prompt:
    ids = chat.encode_chat([dict(one) for one in messages], ())
    return Prompt(prompt_id, tuple(dict(m) for m in messages), tuple(ids), "42", "t")


def said(chat: ChatTokens, text: str | Sequence[int], *, ends: bool = True) -> Response:
    """What an engine has sampled: the tokens of a text, or these, and the end token."""
    ids = list(chat.encode(text)) if isinstance(text, str) else list(text)
    ids += [chat.eos_ids[0]] * ends
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Response("call", 0, np.array(ids, np.int64), logprobs, "stop" if ends else "length", 3)


class ScriptedEngine:
    """An engine that says what ``answer`` says to the text of a prompt, in one step; 8 at once."""

    tensor_model_parallel_size = 1
    slot_steps = None

    def __init__(self, answer: Callable[[str], str], chat: ChatTokens | None = None) -> None:
        self.chat = chat or chat_tokens()
        self.answer = answer
        self.eos_token_ids = self.chat.eos_ids
        self.weights_version = 3
        self.calls: list[EngineCall] = []
        self.cancelled: set[ResponseKey] = set()
        self.is_stuck = False

    def serve(
        self, arrivals: Arrivals, sampling: SamplingConfig, step: int = 0
    ) -> Iterator[list[Response]]:
        while not arrivals.is_over:
            arrivals.wait(0.02)
            self.cancelled |= arrivals.take_cancelled()
            calls = [] if self.is_stuck else arrivals.take(8)
            self.calls += calls
            yield [self._response(call, step) for call in calls]

    def _response(self, call: EngineCall, step: int) -> Response:
        text = self.answer(self.chat.text_of(call.prompt.token_ids))
        ids = [*self.chat.encode(text), self.eos_token_ids[0]][: call.max_tokens]
        ends = ids[-1:] == [self.eos_token_ids[0]]
        if call.ends is not None:
            for count, token in enumerate(ids, start=1):
                if call.ends(token):
                    ids, ends = ids[:count], True
                    break
        return Response(
            prompt_id=call.prompt.prompt_id,
            sample_index=call.index,
            token_ids=np.array(ids, np.int64),
            logprobs=np.full(len(ids), -0.5, np.float32),
            finish_reason="stop" if ends else "length",
            weights_version=self.weights_version,
            step=step,
        )


def save_policy(directory: Path, layers: int = 2, experts: int = 0) -> Path:
    """A tiny Qwen3 of random weights with this tokenizer, with so many ``experts``."""
    import torch
    import transformers

    made = tokenizer()
    torch.manual_seed(3)
    kind = "Qwen3Moe" if experts else "Qwen3"
    of_experts: dict[str, Any] = {}
    if experts:
        of_experts = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
    config = getattr(transformers, f"{kind}Config")(
        **of_experts,
        vocab_size=len(made),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=made.convert_tokens_to_ids(END),
    )
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(directory)
    made.save_pretrained(directory)
    return directory
