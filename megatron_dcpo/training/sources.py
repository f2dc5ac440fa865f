"""What a run trains on: its sources of prompts, in which order they are drawn, and which judge each
has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_dcpo.config import Config
from megatron_dcpo.data.datasets import PromptOptions, draw_prompts, fingerprint, load_prompts
from megatron_dcpo.data.gym import gym_path, is_gym
from megatron_dcpo.data.mixture import LoadedSource, Mixture, curriculum, extended_fingerprint
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.problems import named_sources, verifier_of
from megatron_dcpo.judging.judge import judge_by_task, judge_many
from megatron_dcpo.judging.questions import check_questions
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.judging.verifiers import is_users, reads_rows, verifiers
from megatron_dcpo.training.sampler import Draw
from megatron_dcpo.types import Judgement, Prompt


def load_sources(config: Config, tokenizer: Any) -> list[LoadedSource]:
    """Load what ``data.path`` names. Raises :class:`UserError`."""
    data, judging = config.data, config.judging
    whole = sum(source.weight for source in data.sources)
    loaded = []
    for name, source in named_sources(config).items():
        verifier = verifier_of(source, judging)
        prompts: Sequence[Prompt] = load_prompts(
            gym_path(source.path, source.options, source.size, source.seed)
            if is_gym(source.path)
            else source.path,
            tokenizer,
            PromptOptions(
                template=source.template or data.template,
                max_prompt_length=data.max_prompt_length,
                limit=data.limit or None,
                marker=judging.marker,
                thinking=data.thinking,
            ),
            task=None if isinstance(data.path, str) else name,
            untested=data.untested,
            keep_columns=is_users(verifier) or bool(data.order),
        )
        _check_verifier(prompts, verifier, source.path)
        check_questions(verifier, prompts, source.path)
        ranks = curriculum(prompts, data.order, source.path) if data.order else None
        if not reads_rows(verifier):
            prompts = [replace(prompt, row=None) for prompt in prompts] if data.order else prompts
        loaded.append(
            LoadedSource(name, source.path, prompts, source.weight / whole, verifier, ranks)
        )
    return loaded


def build_draw(config: Config, sources: Sequence[LoadedSource]) -> Draw:
    """Return what gives the prompts at a position of the run."""
    shuffle, seed = config.data.shuffle, config.seed
    if len(sources) == 1:
        return partial(
            draw_prompts, sources[0].prompts, seed=seed, shuffle=shuffle, ranks=sources[0].ranks
        )
    prompts, weights, ranks = zip(*((s.prompts, s.weight, s.ranks) for s in sources), strict=True)
    return Mixture(prompts, weights, config.data.prompts_per_step, seed, shuffle, ranks)


def fingerprint_of(sources: Sequence[LoadedSource]) -> str:
    """Return a short name for what is drawn: equal when a resumed run would train on the same."""
    names = [fingerprint(source.prompts) for source in sources]
    if len(sources) == 1 and sources[0].ranks is None:
        return names[0]
    return extended_fingerprint(names, [s.weight for s in sources], [s.ranks for s in sources])


def build_judge(
    config: Config, sources: Sequence[LoadedSource], tokens: TokenBytes
) -> Callable[..., list[Judgement]]:
    """Return the judge of all sources, which takes ``eos_ids`` as well. Raises :class:`UserError`
    when programs cannot be run safely here.
    """
    tests = {
        p.ground_truth: p.tests for source in sources for p in source.prompts if p.tests is not None
    }
    find = verifiers(config.judging, tests)
    judges: dict[str, Callable[..., list[Judgement]]] = {}
    for source in sources:
        verifier, form = find(source.verifier)
        judge = partial(judge_many, tokens=tokens, marker=config.judging.marker)
        judges[source.name] = partial(judge, verifier=verifier, form=form)
    return partial(judge_by_task, judges=judges) if len(judges) > 1 else judges[sources[0].name]


def _check_verifier(prompts: Sequence[Prompt], verifier: str, path: str) -> None:
    """Raise :class:`UserError` when the data is for another verifier."""
    with_tests = sum(prompt.tests is not None for prompt in prompts)
    if verifier == "math" and with_tests:
        raise UserError(f"{path}: {with_tests} programming problems; set judging.verifier=code")
    for form, names in (("choice", "choice"), ("short", "exact (or f1)")):
        if verifier == "math" and (asked := sum(prompt.form == form for prompt in prompts)):
            raise UserError(
                f"{path}: {asked} questions whose answers are no mathematics; set "
                f"judging.verifier={names}"
            )
    if verifier == "code" and with_tests < len(prompts):
        raise UserError(
            f"{path}: {len(prompts) - with_tests} of {len(prompts)} problems have no tests; "
            "judging.verifier=code needs programming problems"
        )
