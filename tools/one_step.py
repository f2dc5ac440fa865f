"""One training step on a batch of two prompts, with its real values: writes ``docs/one_step.md``.

    python tools/one_step.py [--out docs/one_step.md]

The step is the quickstart's DCPO on its starting policy, cut to two prompts and four responses
each. Every value on the page comes from the functions that ``training/loop.py`` calls, in its
order; nothing is computed here. The page ends with the classes of which a step builds objects,
counted in a run of one step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from megatron_dcpo.config import Config, load_config  # noqa: E402
from megatron_dcpo.rollout.tokens import load_tokenizer  # noqa: E402
from megatron_dcpo.runtime.distributed import destroy  # noqa: E402
from megatron_dcpo.training.loop import train  # noqa: E402
from megatron_dcpo.training.run import Run, build  # noqa: E402
from megatron_dcpo.types import BLOCKS, TrainingSample, replaced  # noqa: E402

RECORDS = (
    "megatron_dcpo.types",
    "megatron_dcpo.training",
    "megatron_dcpo.objectives",
    "megatron_dcpo.policy.batching",
)
JUDGED_COLUMNS = ("prompt_id", "#", "response", "R", "c", "status", "boundary / tokens")
STEP = 5  # of the quickstart: both of its first two prompts have right and wrong answers
QUICKSTART = REPOSITORY / "examples" / "quickstart"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "one_step.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        with counted_objects() as built:
            train(configuration(directory, "training.steps=1", "logging.to=[]"))
        with build(configuration(directory)) as run:
            args.out.write_text(page(run, built))
        destroy()


def configuration(directory: str, *more: str) -> Config:
    """The quickstart's, cut to two prompts."""
    overrides = {
        "model.path": QUICKSTART / "policy",
        "data.path": QUICKSTART / "data" / "train.jsonl",
        "run_dir": directory,
        "data.prompts_per_step": 2,
        "rollout.group_size": 4,
        "training.updates_per_rollout": 1,
        "rollout.engine": "transformers",
    }
    return load_config(
        QUICKSTART / "dcpo.yaml", [*(f"{key}={value}" for key, value in overrides.items()), *more]
    )


@cache
def tokenizer() -> Any:
    """The tokenizer of the quickstart's policy."""
    return load_tokenizer(QUICKSTART / "policy")


def decoded(token_ids: list[int]) -> str:
    """The text of token ids."""
    return str(tokenizer().decode(token_ids))


@contextmanager
def counted_objects() -> Iterator[dict[str, set[str]]]:
    """The classes of :data:`RECORDS` of which objects are built inside the block, on any thread, by
    module.
    """
    built: dict[str, set[str]] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        named_tuple = code.co_name == "<lambda>" and code.co_varnames[:1] == (
            "_cls",
        )  # its __new__
        if (
            event != "call"
            or not code.co_argcount
            or not (code.co_name == "__init__" or named_tuple)
        ):
            return
        first = frame.f_locals[code.co_varnames[0]]
        cls = first if named_tuple else type(first)
        module = str(type.__getattribute__(cls, "__module__"))
        if module.startswith(RECORDS):
            built.setdefault(module.removeprefix("megatron_dcpo."), set()).add(cls.__name__)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        yield built
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def page(run: Run, built: dict[str, set[str]]) -> str:
    """The step, function by function, in the order of ``training/loop.py``."""
    updater = run.updater
    run.weight_sync.push(version=STEP - 1)
    samples = run.rollouts.take(STEP).samples
    prompts = {sample.prompt.prompt_id: sample.prompt for sample in samples}.values()
    old = [sample.old_logprobs for sample in updater.with_old_logprobs(samples)]
    scored = updater.method.score(samples)
    run.optimizer.zero_gradients()
    parts = updater.accumulate(scored)
    norm, before = run.optimizer.gradient_norm(), one_weight(run)
    run.optimizer.step()
    traffic = run.weight_sync.push(version=STEP)
    shown = [replaced(sample, old_logprobs=row) for sample, row in zip(scored, old, strict=True)]
    followed = next(s for s in shown if s.judgement.status == "ok" and not s.judgement.correct)
    sections = (
        HEAD,
        "## 1. Prompts",
        table(("prompt_id", "last message", "tokens", "ground truth"), map(prompt_row, prompts)),
        "## 2. Responses and judgements",
        JUDGED,
        table(JUDGED_COLUMNS, map(partial(judged_row, run), samples)),
        "## 3. Rewards and advantages",
        SCORED,
        table(("prompt_id", "#", "R", "R_c", "A_r", "A_c"), map(reward_row, scored)),
        "## 4. One response, token by token",
        f"Response {followed.response.sample_index} to `{followed.prompt.prompt_id}`.\n{TOKENS}",
        table(
            ("token", "piece", "block", "advantage", "weight", "log-prob"),
            token_rows(run, followed),
        ),
        "## 5. Loss and gradient",
        loss_text(parts, norm),
        "## 6. New weights",
        SYNCED,
        f"* `decoder.final_layernorm.weight[0]`: {before:.6f} → {one_weight(run):.6f}\n"
        f"* bytes that travelled between ranks: {traffic['reshard/bytes']:,} (one process: "
        "everything is copied in place)\n"
        f"* version of the engine's weights: {run.engine.weights_version}",
        "## 7. The classes of a step",
        CLASSES,
        "\n".join(
            textwrap.fill(
                f"* `{module}`: {', '.join(sorted(names))}", width=100, subsequent_indent="  "
            )
            for module, names in sorted(built.items())
        ),
    )
    return "\n\n".join(sections) + "\n"


HEAD = """# One step, with its numbers

<!-- made by tools/one_step.py; a test makes it again and compares -->

A training step of the quickstart's DCPO, cut to two prompts and four responses each, followed from
the prompts to the new weights. The functions are those of `training/loop.py`, in its order. One
response is one `TrainingSample` (`types.py`) all the way: every stage returns a copy with its own
fields filled."""
JUDGED = """\
`Sampler.sample` draws the prompts, samples with the engine and hands each response to the judge as
soon as it is finished; all ranks get the same `TrainingSample(prompt, response, judgement)`, but
for the tokens, which stay where they were sampled until a rank computes them (`fetch`). R is the
correctness, c the stated confidence; tokens before the boundary reason, the others state the
confidence."""
SCORED = """\
The sampler scores a group when its last response is judged: `Method.group_scores` calls
`score_group` of `objectives/dcpo.py`. The target mixes the group's accuracy with R (lambda 0.5),
R_c = -|c - target|, and both rewards are normalized within the group (mean 0, deviation 1).
`Updater.update` cuts the samples into mini-batches (`split_groups`; here one) and `Method.score`
puts the advantages on the tokens of each."""
TOKENS = """\
A_r stands on its reasoning tokens, A_c on its confidence tokens; the weight is the token's share of
the loss, 1 / (responses x tokens of the response) (`Method.token_weights`). `Updater.accumulate`
deals the responses to the data-parallel ranks and runs their micro-batches through Megatron's
schedule; `collate` adds the columns to the tokens, and `Method.loss` returns weight x clipped loss
of every token. The log-probs are the policy's before the update (`Updater.with_old_logprobs`)."""
SYNCED = """\
The optimizer moves the policy and `WeightSync.push` hands the new weights to the engine, which from
then on samples the next step's responses."""
CLASSES = """\
Objects of these classes of `types`, `training`, `objectives` and `policy.batching` are built in a
run of one step. Those of `types` are the data; of the others there is one, but for `Method` and its
options (one per method) and `PromptGroup` (one per prompt)."""


def table(header: Sequence[str], rows: Any) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def prompt_row(prompt: Any) -> tuple[Any, ...]:
    return (
        f"`{prompt.prompt_id}`",
        code(prompt.messages[-1]["content"]),
        len(prompt.token_ids),
        prompt.ground_truth,
    )


def judged_row(run: Run, sample: TrainingSample) -> tuple[Any, ...]:
    judgement = sample.judgement
    stated = "–" if judgement.confidence is None else f"{judgement.confidence:g}"
    place = f"{judgement.boundary} / {judgement.length}"
    return (
        *key(sample),
        code(decoded(sample.response_ids.tolist())),
        f"{judgement.correct:.0f}",
        stated,
        judgement.status,
        place,
    )


def reward_row(sample: TrainingSample) -> tuple[Any, ...]:
    assert sample.advantages is not None
    boundary = int((sample.block_ids == BLOCKS["reasoning"]).sum())
    a_r, a_c = (sample.advantages[0], sample.advantages[min(boundary, len(sample.advantages) - 1)])
    return (*key(sample), f"{sample.R:.0f}", f"{sample.R_c:+.4f}", f"{a_r:+.4f}", f"{a_c:+.4f}")


def token_rows(run: Run, sample: TrainingSample) -> list[tuple[Any, ...]]:
    names = {number: name for name, number in BLOCKS.items()}
    columns: Any = (sample.block_ids, sample.advantages, sample.weights, sample.old_logprobs)
    return [
        (i, code(decoded([int(t)])), names[int(b)], f"{a:+.4f}", f"{w:.5f}", f"{lp:+.3f}")
        for i, (t, b, a, w, lp) in enumerate(zip(sample.response_ids, *columns, strict=True))
    ]


def loss_text(parts: Sequence[dict[str, float]], norm: float) -> str:
    tokens = {block: sum(part[f"tokens/{block}"] for part in parts) for block in BLOCKS}
    return (
        f"{len(parts)} micro-batch(es) with {tokens['reasoning']:.0f} reasoning and "
        f"{tokens['confidence']:.0f} confidence "
        "tokens.\n\n"
        f"* loss: {sum(part['loss'] for part in parts):+.5f} (the ratio is 1: minus the weighted "
        "sum of the advantages)\n"
        f"* gradient norm: {norm:.4f}"
    )


def key(sample: TrainingSample) -> tuple[str, int]:
    return f"`{sample.prompt.prompt_id}`", sample.response.sample_index


def one_weight(run: Run) -> float:
    return run.policy.gpt[0].decoder.final_layernorm.weight[0].item()


def code(text: str) -> str:
    """``text`` inside a table cell."""
    return (
        "`" + text.replace("\n", "⏎").replace("|", "¦") + "`"
        if text.strip()
        else "`⏎`"
        if "\n" in text
        else "` `"
    )


if __name__ == "__main__":
    main()
