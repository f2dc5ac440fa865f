"""What a run trains on: its sources of prompts, the order in which they are drawn, and the judge of
each source.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_dcpo.config import Config, SourceConfig
from megatron_dcpo.config.field_types import VerifierChoice, members
from megatron_dcpo.data.datasets import PromptOptions, draw_prompts, fingerprint, load_prompts
from megatron_dcpo.data.mixture import LoadedSource, Mixture, curriculum, extended_fingerprint
from megatron_dcpo.data.prompts import without_box_request
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.judge import judge_by_task, judge_many
from megatron_dcpo.judging.source_verifiers import (
    named_sources,
    path_of,
    verifier_of,
    with_answers,
)
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.judging.verdicts import with_verdicts
from megatron_dcpo.judging.verifiers import check_problems, is_users, reads_rows, verifiers
from megatron_dcpo.training.sampler import Draw
from megatron_dcpo.types import Judgement, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_sources(
    config: Config, tokenizer: PreTrainedTokenizerBase, date: datetime.date | None = None
) -> list[LoadedSource]:
    """Load what ``data.path`` names. Raises :class:`UserError`.

    Chat templates write the ``date``, None for today's.
    """
    total_weight = sum(source.weight for source in config.data.sources)
    loaded = []
    for name, source in named_sources(config).items():
        verifier = verifier_of(source, config.judging)
        keeps_columns = is_users(verifier) or config.rollout.runs_agents
        prompts = load_prompts(
            path_of(source),
            tokenizer,
            _prompt_options(config, source, date),
            task=None if isinstance(config.data.path, str) else name,
            keep_columns=keeps_columns,
            reading=RowOptions(
                columns=source.columns,
                row=source.row,
                unread=config.data.unread,
                order=config.data.order,
            ),
        )
        prompts = with_answers(verifier, prompts, source.path)
        _check_verifier(prompts, verifier, source.path)
        check_problems(verifier, prompts, source.path)
        ranks = None
        if config.data.order:
            ranks = curriculum(prompts, config.data.order, source.path)
            if not (keeps_columns or reads_rows(verifier)):  # only the order has read the columns
                prompts = [replace(prompt, row=None) for prompt in prompts]
        loaded.append(
            LoadedSource(
                name=name,
                path=source.path,
                prompts=prompts,
                weight=source.weight / total_weight,
                ranks=ranks,
            )
        )
    return loaded


def trained_problems(sources: Sequence[LoadedSource], held_out: Iterable[Prompt]) -> str:
    """Return what to say of held-out problems that are in the training data, "" if there are none.
    Two texts are one problem if they differ in case and white space only, and in a sentence at the
    end that asks for a box.
    """
    trained = {_plain(prompt) for source in sources for prompt in source.prompts}
    problems: Counter[str] = Counter()
    known: Counter[str] = Counter()
    for prompt in held_out:
        problems[prompt.task] += 1
        known[prompt.task] += _plain(prompt) in trained
    counts = [f"{known[task]} of {task}'s {problems[task]}" for task in problems if known[task]]
    if not counts:
        return ""
    return f"held-out problems that are in the training data: {', '.join(counts)}"


def contradictions(sources: Sequence[LoadedSource]) -> str:
    """Return what to say of prompts that are there more than once with different answers, "" if
    there are none: at most one of the answers can be learned.
    """
    answers: dict[tuple[int, ...], set[str]] = {}
    for source in sources:
        for prompt in source.prompts:
            answers.setdefault(prompt.token_ids, set()).add(prompt.ground_truth)
    several = sum(len(found) > 1 for found in answers.values())
    if not several:
        return ""
    return f"prompts that are in the training data with different answers: {several:,}"


def _plain(prompt: Prompt) -> str:
    problem = without_box_request(prompt.problem or prompt.messages[-1]["content"])
    return " ".join(problem.casefold().split())


def _prompt_options(
    config: Config, source: SourceConfig, date: datetime.date | None
) -> PromptOptions:
    data = config.data
    return PromptOptions(
        template=source.template or data.template,
        max_prompt_length=data.max_prompt_length,
        limit=data.limit or None,
        marker=config.judging.marker,
        thinking=data.thinking,
        date=date,
    )


def build_draw(config: Config, sources: Sequence[LoadedSource]) -> Draw:
    """Return what gives the prompts at a position of the run."""
    if len(sources) == 1:
        return partial(
            draw_prompts,
            sources[0].prompts,
            seed=config.seed,
            shuffle=config.data.shuffle,
            ranks=sources[0].ranks,
        )
    return Mixture(
        tuple(source.prompts for source in sources),
        tuple(source.weight for source in sources),
        config.data.prompts_per_step,
        config.seed,
        config.data.shuffle,
        tuple(source.ranks for source in sources),
    )


def fingerprint_of(sources: Sequence[LoadedSource]) -> str:
    """Return a short name for what is drawn: equal when a resumed run would train on the same."""
    names = [fingerprint(source.prompts) for source in sources]
    if len(sources) == 1 and sources[0].ranks is None:
        return names[0]
    weights = [source.weight for source in sources]
    ranks = [source.ranks for source in sources]
    return extended_fingerprint(names, weights, ranks)


def build_judge(
    config: Config, sources: Sequence[LoadedSource], tokens: TokenBytes
) -> Callable[..., Sequence[Judgement | None]]:
    """Return the judge of all sources, which takes ``eos_ids`` as well. Raises :class:`UserError`
    when programs cannot be run safely here.
    """
    tests = {}
    for source in sources:
        for prompt in source.prompts:
            if prompt.tests is not None:
                tests[prompt.ground_truth] = prompt.tests
    find = verifiers(config.judging, tests)
    judges: dict[str, Callable[..., Sequence[Judgement | None]]] = {}
    named = named_sources(config)
    for source in sources:
        chosen = verifier_of(named[source.name], config.judging)
        verifier, form = find(chosen)
        judge = partial(judge_many, tokens=tokens, marker=config.judging.marker)
        verifier = with_verdicts(verifier, config.judging)
        judges[source.name] = partial(judge, verifier=verifier, form=form)
    if len(judges) == 1:
        return judges[sources[0].name]
    return partial(judge_by_task, judges=judges)


def _check_verifier(prompts: Sequence[Prompt], chosen: VerifierChoice, path: str) -> None:
    """Raise :class:`UserError` when the data is for another verifier."""
    for member in members(chosen):
        _check_named_verifier(prompts, member.name, path)


def _check_named_verifier(prompts: Sequence[Prompt], verifier: str, path: str) -> None:
    with_tests = sum(prompt.tests is not None for prompt in prompts)
    if verifier == "math" and with_tests:
        raise UserError(f"{path}: {with_tests} programming problems; set judging.verifier=code")
    for form, names in (("choice", "choice"), ("short", "exact (or f1)")):
        questions = sum(prompt.form == form for prompt in prompts)
        if verifier == "math" and questions:
            raise UserError(f"{path}: {questions} non-math questions; set judging.verifier={names}")
    if verifier == "code" and with_tests < len(prompts):
        raise UserError(
            f"{path}: {len(prompts) - with_tests} of {len(prompts)} problems have no tests; "
            "judging.verifier=code needs programming problems"
        )
