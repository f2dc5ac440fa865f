"""What can be refused before anything is allocated: processes, packages, layout, vocabulary,
lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_dcpo.architectures.config_json import Architecture, read_architecture
from megatron_dcpo.config import Config, RunConfig, rules
from megatron_dcpo.data.mixture import LoadedSource
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.source_verifiers import named_sources
from megatron_dcpo.judging.thinking import check_thinking
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.judging.verifiers import check_verifier
from megatron_dcpo.rollout.tokens import check_vocabulary, load_tokenizer
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.plugins import load_part
from megatron_dcpo.training.validation import HeldOutProblems
from megatron_dcpo.types import Prompt
from megatron_dcpo.weights.hf_checkpoint import check_side_files
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.pipeline import chunk_layers
from megatron_dcpo.weights.planner import check_layout

SERVED_TEACHER = "megatron_dcpo.training.served_teacher:ServedTeacher"


def check_processes(config: RunConfig, processes: int | None) -> None:
    """Check the number of processes, if it is known, and Transformer Engine, if it is needed.
    Raises :class:`UserError`.
    """
    if processes is not None:
        rules.check_processes(config, processes)
    if config.model.transformer_impl == "transformer_engine" or capabilities().transformer_engine:
        from megatron_dcpo.policy.layers import use_transformer_engine

        use_transformer_engine(config.model.transformer_impl)


def check_pass_through(config: Config) -> None:
    """Check the names of options that are passed on to Megatron and vLLM, if installed, what the
    device can do of them, the prompt template and the verifier. Raises :class:`UserError`.
    """
    find_template(config.data.template)
    for source in named_sources(config).values():
        find_template(source.template or config.data.template)
        check_verifier(source.verifier or config.judging.verifier)
    check_names_of_megatron(config)
    if config.rollout.vllm:
        load_part("megatron_dcpo.rollout.vllm_host:check_engine_arguments")(config.rollout.vllm)
        if config.rollout.engine != "server":  # which has devices of its own
            check_device = load_part("megatron_dcpo.rollout.vllm_host:check_fp8_device")
            check_device(config.rollout.quantization)


def check_names_of_megatron(config: RunConfig) -> None:
    """Check the names of options that are passed on to Megatron, if it is installed. Raises
    :class:`UserError`.
    """
    if config.parallel.megatron:
        from megatron_dcpo.policy.megatron_options import check_megatron_options

        check_megatron_options(config.parallel.megatron)


def check_model(config: Config) -> Architecture:
    """Return the architecture of a run of RL, checked against all its options. Raises
    :class:`UserError`.
    """
    check_pass_through(config)
    return check_architecture(config)


def check_architecture(config: RunConfig) -> Architecture:
    """Return the architecture, checked against the parallel layout. Raises :class:`UserError`."""
    arch = read_architecture(config.model.path)
    check_side_files(Path(config.model.path))
    check_names_of_megatron(config)
    layout = Layout.of(config.parallel)
    check_layout(arch, layout)
    if config.model.adapter is not None:
        load_part("megatron_dcpo.weights.adapter_shape:check_adaptable")(arch)
    rules.check_model_rules(config, arch, chunk_layers(arch.num_layers, layout))
    return arch


def check_tokens(config: Config, arch: Architecture, vocabulary: TokenBytes) -> None:
    """Raise :class:`UserError` when the tokenizer or the model's end tokens have ids that the model
    has no embedding of, when no token ends a response, or when the tokenizer cannot end a thinking
    that is on.
    """
    check_thinking(config.data.thinking, vocabulary.thinking, config.model.path)
    check_vocabulary(config.model.path, vocabulary, arch.vocab_size)


def check_teacher(
    config: Config,
    arch: Architecture,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: TokenBytes,
) -> None:
    """Raise :class:`UserError` when the layout does not divide the teacher, when its tokens are not
    the policy's, so that its log-probs would be of other texts, or when its server does not answer.
    """
    path = config.objective.teacher
    if not path:
        return
    if config.objective.teacher_is_served:
        served = load_part(SERVED_TEACHER).before_a_run(path, teachers_of_sources(config))
        for one in served.every:
            one.check(len(vocabulary.table), lambda ids: str(tokenizer.decode(ids)))
        return
    if not Path(path).is_dir():
        raise UserError(
            f"objective.teacher={path} is not a directory; download the model, and name its "
            "directory"
        )
    try:
        teacher = read_architecture(path)
        check_layout(teacher, Layout.of(config.parallel))
        tokens = token_bytes(load_tokenizer(path))
        check_vocabulary(path, tokens, teacher.vocab_size)
    except UserError as error:
        raise UserError(f"objective.teacher={path}: {error}") from None
    if tokens.table != vocabulary.table:
        raise UserError(
            f"objective.teacher={path} has another tokenizer than model.path={config.model.path} "
            f"({_first_difference(tokens, vocabulary)}); a teacher scores the policy's tokens: "
            "take one with the same tokenizer"
        )
    if teacher.vocab_size < arch.vocab_size:
        raise UserError(
            f"objective.teacher={path} has {teacher.vocab_size} embeddings, and the policy can "
            f"sample {arch.vocab_size} tokens; take a teacher with as many"
        )


def teachers_of_sources(config: Config) -> dict[str, str]:
    """Return the servers that read the samples of single sources, by the names of these."""
    named = named_sources(config).items()
    return {name: source.teacher for name, source in named if source.teacher}


def _first_difference(teacher: TokenBytes, policy: TokenBytes) -> str:
    """Return what the first token that differs is in both vocabularies."""
    longest = max(len(teacher.table), len(policy.table))
    token = next(index for index in range(longest) if teacher[index] != policy[index])
    return f"token {token} is {teacher[token]!r:.40} there and {policy[token]!r:.40} here"


def check_lengths(
    config: Config,
    arch: Architecture,
    sources: Sequence[LoadedSource],
    held_out: HeldOutProblems | None,
) -> int:
    """Return the length of the longest prompt that is trained on. Raise :class:`UserError` when a
    prompt and a response are more than the model has positions, in training or in the validation.
    """
    response = config.rollout.max_response_length
    longest = max((prompt for source in sources for prompt in source.prompts), key=_length)
    _check_positions(config, arch, longest, "rollout.max_response_length", response)
    _check_positions_of_teacher(config, _length(longest) + response)
    if held_out:
        limit = config.evaluation.max_tokens
        name = "evaluation.max_tokens" if limit else "rollout.max_response_length"
        of_benchmarks = max(held_out.prompts.values(), key=_length)
        _check_positions(config, arch, of_benchmarks, name, limit or response, is_benchmark=True)
    return _length(longest)


def _check_positions_of_teacher(config: Config, tokens: int) -> None:
    """Raise :class:`UserError` when the longest prompt and response of ``tokens`` are more than a
    teacher has positions, if there is one that can be asked.
    """
    path = config.objective.teacher
    positions: dict[str, int] = {}
    if config.objective.teacher_is_served:
        served = load_part(SERVED_TEACHER).before_a_run(path, teachers_of_sources(config))
        positions = {one.url: one.positions() - 1 for one in served.every}  # it samples one more
    elif path and Path(path).is_dir():
        positions = {path: read_architecture(path).max_position_embeddings}
    for name, most in positions.items():
        if tokens > most:
            raise UserError(
                f"objective.teacher={name} has {most} positions (max_position_embeddings), and "
                f"the longest prompt and response have {tokens} tokens; lower "
                "rollout.max_response_length, or take another teacher"
            )


def _length(prompt: Prompt) -> int:
    return len(prompt.token_ids)


def _check_positions(
    config: Config,
    arch: Architecture,
    prompt: Prompt,
    name: str,
    tokens: int,
    is_benchmark: bool = False,
) -> None:
    """Raise :class:`UserError` when a prompt and a response of at most ``tokens``, which the option
    ``name`` says, are more than the model has positions.
    """
    if _length(prompt) + tokens <= arch.max_position_embeddings:
        return
    shorter = "data.max_prompt_length"
    if is_benchmark:
        shorter = f"leave {prompt.task} out of evaluation.benchmarks"
    raise UserError(
        f"{name}={tokens} and the prompt {prompt.prompt_id} of {_length(prompt)} tokens are more "
        f"than {config.model.path} has positions "
        f"(max_position_embeddings={arch.max_position_embeddings}); lower it, or {shorter}"
    )
