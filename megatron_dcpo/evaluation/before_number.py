"""The tokens of a judged answer up to the number of its confidence: what was asked, what was
answered, and the tag.

An adapter learns what stands behind them (``training/confidence_adapter.py``), and a probe reads
the model's state at the last one (``states.py``).
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_dcpo.data import prompts
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Sample, digest_asked
from megatron_dcpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def tokens_of_numbers(
    tokenizer: PreTrainedTokenizerBase, marker: str, decimals: int
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Return the tokens with which every confidence of so many ``decimals`` begins (the tag, and
    what is before the number), and what follows them for each of the numbers from 0 to 1.
    """
    steps = 10**decimals
    texts = [f"{number / steps:.{decimals}f}" for number in range(steps + 1)]
    paths = [
        tuple(tokenizer.encode(f"{marker} Confidence: {text}", add_special_tokens=False))
        for text in texts
    ]
    same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*paths, strict=False))
    common = len(list(same))
    # a position that scores the first token of the number has to be left
    common = min(common, min(map(len, paths)) - 1)
    return paths[0][:common], [path[common:] for path in paths]


@dataclass(frozen=True)
class RenderedAs:
    """How prompts were rendered, which has to be the same when their tokens are made again."""

    marker: str
    template: str
    thinking: str
    date: datetime.date | None = None


@dataclass(frozen=True)
class BeforeNumber:
    """Makes the tokens of samples up to the number; at most ``most_tokens`` of them. ``opening``
    stands between an answer and its number.
    """

    tokenizer: PreTrainedTokenizerBase
    rendered_as: RenderedAs
    opening: tuple[int, ...]
    most_tokens: int

    def token_ids(self, samples: Sequence[Sample]) -> list[tuple[int, ...] | None]:
        """Return the tokens of each sample; None for one that is not finished or too long, which a
        line says. Raises :class:`UserError` if a sample was asked something else than is put here.
        """
        found: list[tuple[int, ...] | None] = []
        prompt_ids: dict[tuple[str, str], tuple[int, ...]] = {}
        for sample in samples:
            if sample.problem_key not in prompt_ids:
                prompt_ids[sample.problem_key] = self._prompt_ids(sample)
            found.append(self._token_ids(sample, prompt_ids[sample.problem_key]))
        unfinished = sum(sample.response.finish_reason != "stop" for sample in samples)
        if unfinished:
            logger.warning(
                "%d of %d responses are not finished and have no confidence",
                unfinished,
                len(samples),
            )
        too_long = found.count(None) - unfinished
        if too_long:
            logger.warning(
                "%d responses are longer than %d tokens with their prompt and have no confidence",
                too_long,
                self.most_tokens,
            )
        return found

    def _token_ids(self, sample: Sample, prompt_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        if sample.response.finish_reason != "stop":
            return None
        text = sample.response.text or ""
        # a tag that the thinking mentions is not the answer's
        start = sample.judgement.thinking_characters
        before_tag = text[:start] + text[start:].partition(self.rendered_as.marker)[0]
        # the newline before the tag keeps the tokens of the answer apart from it
        before_tag = before_tag.rstrip() + "\n"
        answer_ids = self.tokenizer.encode(before_tag, add_special_tokens=False)
        token_ids = (*prompt_ids, *answer_ids, *self.opening)
        return token_ids if len(token_ids) <= self.most_tokens else None

    def _prompt_ids(self, sample: Sample) -> tuple[int, ...]:
        """Return the tokens of the prompt, and check that they are what the sample was asked."""
        problem = sample.prompt.problem
        if not problem:
            raise UserError(
                f"the samples do not hold the problems ({sample.prompt.prompt_id}); sample them "
                "again with this release"
            )
        messages, ids = prompts.render(
            self.tokenizer,
            ({"role": "user", "content": problem},),
            self.rendered_as.template,
            self.rendered_as.marker,
            sample.prompt.form,
            self.rendered_as.thinking,
            self.rendered_as.date,
        )
        with_tokens = Prompt(
            prompt_id="", messages=messages, token_ids=tuple(ids), ground_truth="", task=""
        )
        as_messages = replace(with_tokens, token_ids=())
        known = {digest_asked(with_tokens), digest_asked(as_messages)}
        if sample.origin.asked is not None and sample.origin.asked not in known:
            raise UserError(
                f"{sample.prompt.prompt_id} was asked with another prompt than "
                f"data.template={self.rendered_as.template} makes of it here; name the template "
                "that it was asked with (and the tokenizer's directory as --model)"
            )
        return tuple(ids)
