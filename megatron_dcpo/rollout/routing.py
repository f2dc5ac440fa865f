"""Records of the experts that an engine's routers choose, for the trainer
(``rollout.routing_replay``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ExpertRecorder:
    """Records the choices of a transformers model's routers, forward pass by forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._taken: dict[int, torch.Tensor] = {}  # by layer
        self._layers: int = model.config.num_hidden_layers
        routers = {}
        for name, module in model.named_modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                routers[_layer_of(name)] = module
        if not routers:
            raise UserError(
                "rollout.routing_replay=true: no router is found in this model; remove it"
            )
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._take, layer))

    def _take(
        self, layer: int, router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]
    ) -> None:
        """Keep the chosen [tokens, k] of a router's output: logits, weights of the chosen, and
        them.
        """
        self._taken[layer] = output[2]

    def take(self, rows: int) -> np.ndarray:
        """Return the choices of the last forward pass, int16 [rows, width, layers, k]; -1 in layers
        without experts.
        """
        no_choice = torch.full_like(next(iter(self._taken.values())), -1)
        layers = [self._taken.get(layer, no_choice) for layer in range(self._layers)]
        taken = torch.stack(layers, 1).to(torch.int16).cpu().numpy()
        self._taken.clear()
        return taken.reshape(rows, -1, *taken.shape[1:])


def _layer_of(module: str) -> int:
    """Return the number of the layer of a module of transformers (``model.layers.3.mlp.gate``)."""
    _, _, inside = module.partition("layers.")
    return int(inside.partition(".")[0])


class RecordedExperts:
    """The choices for the samples of a rollout: for the prompt of each sample, and for its tokens
    [max_tokens, layers, k].
    """

    def __init__(self, samples: int, max_tokens: int) -> None:
        self._prompts: list[Any] = [None] * samples
        self._shape = (samples, max_tokens)
        self._tokens = np.zeros((0,))

    def note_prompts(self, rows: Sequence[int], choices: Sequence[np.ndarray]) -> None:
        for row, prompt_choices in zip(rows, choices, strict=True):
            self._prompts[row] = prompt_choices
        if not self._tokens.size:
            self._tokens = np.zeros((*self._shape, *choices[0].shape[1:]), np.int16)

    def note_tokens(self, rows: torch.Tensor, counts: torch.Tensor, choices: np.ndarray) -> None:
        """Note the choices [rows, 1, layers, k] for the last of each row's ``counts`` tokens."""
        self._tokens[rows.cpu().numpy(), counts.cpu().numpy() - 1] = choices[:, 0]

    def of(self, row: int, before: int, tokens: int) -> np.ndarray | None:
        """Return the choices for what a sample began with, its prompt and the tokens ``before``,
        and for those sampled behind it, up to ``tokens`` in all. The last one is not run. None for
        a sample that still waits.
        """
        if self._prompts[row] is None:
            return None
        sampled = self._tokens[row, before : max(tokens - 1, before)]
        return np.concatenate([self._prompts[row], sampled])


@contextlib.contextmanager
def every_rank_returns_experts() -> Iterator[None]:
    """Let every rank of an engine keep the choices. vLLM keeps them on the first rank, which has
    its only scheduler; here each rank has a scheduler, which asks for them (``take_output`` in
    ``vllm/distributed/aux_output_connector/connector.py``).
    """
    from vllm.distributed.aux_output_connector import worker

    with patch.object(worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True)):
        yield


def completed_experts(length: int, prompt: Prompt, experts: np.ndarray | None) -> np.ndarray:
    """Return the ``routed_experts`` of a finished completion of vLLM, [length, layers, k]. Raises
    :class:`EngineError` if their number of tokens is another.
    """
    if experts is None or len(experts) != length:
        count = "none" if experts is None else len(experts)
        raise EngineError(
            f"{prompt.prompt_id}: vLLM returned the experts of {count} tokens, not of {length}"
        )
    return np.asarray(experts)
