"""One training step on a batch of two prompts, with its real values: writes ``docs/one_step.md``.

    python tools/one_step.py [--out docs/one_step.md]

The step is the quickstart's DCPO on its starting policy, cut to two prompts and four responses each. Every value on the page
comes from the functions that ``training/loop.py`` calls, in its order; nothing is computed here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from megatron_dcpo.training.sampling import TrainingSample, sample_step  # noqa: E402
from megatron_dcpo.training.update import MiniBatch, accumulate, score, with_old_logprobs  # noqa: E402

from megatron_dcpo.config import load_config  # noqa: E402
from megatron_dcpo.policy.optimizer import gradient_norm, zero_gradients  # noqa: E402
from megatron_dcpo.runtime.distributed import destroy  # noqa: E402
from megatron_dcpo.runtime.watchdog import Timers  # noqa: E402
from megatron_dcpo.training.run import TrainingRun, build_run  # noqa: E402
from megatron_dcpo.training.weight_sync import synchronize_engine  # noqa: E402
from megatron_dcpo.types import BLOCKS  # noqa: E402

JUDGED_COLUMNS = ("prompt_id", "#", "response", "R", "c", "status", "boundary / tokens")
STEP = 5  # of the quickstart: both of its first two prompts have right and wrong answers
QUICKSTART = REPOSITORY / "examples" / "quickstart"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "one_step.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        overrides = {
            "model.path": QUICKSTART / "policy", "data.path": QUICKSTART / "data" / "train.jsonl", "run_dir": directory,
            "data.prompts_per_step": 2, "rollout.group_size": 4, "training.updates_per_rollout": 1,
            "rollout.engine": "transformers",
        }  # fmt: skip
        config = load_config(QUICKSTART / "dcpo.yaml", [f"{key}={value}" for key, value in overrides.items()])
        run = build_run(config)
        with run.watch:
            args.out.write_text(page(run))
        destroy()


def page(run: TrainingRun) -> str:
    """The step, function by function, in the order of ``training/loop.py``."""
    synchronize_engine(run, version=STEP - 1)
    samples = sample_step(run, STEP, Timers(run.watch))
    prompts = {sample.prompt.prompt_id: sample.prompt for sample in samples}.values()
    mini_batch = with_old_logprobs(run, MiniBatch.of(run, samples))
    scored = score(run, mini_batch)
    zero_gradients(run.policy, run.optimizer)
    parts = accumulate(run, scored)
    norm, before = gradient_norm(run.optimizer), one_weight(run)
    run.optimizer.step()
    traffic = synchronize_engine(run, version=STEP)
    followed = next(s for s in scored.samples if s.judgement.status == "ok" and not s.judgement.correct)
    sections = (
        HEAD,
        "## 1. Prompts", table(("prompt_id", "last message", "tokens", "ground truth"), map(prompt_row, prompts)),
        "## 2. Responses and judgements", JUDGED,
        table(JUDGED_COLUMNS, map(partial(judged_row, run), samples)),
        "## 3. Rewards and advantages", SCORED,
        table(("prompt_id", "#", "R", "R_c", "A_r", "A_c"), map(reward_row, scored.samples)),
        "## 4. One response, token by token",
        f"Response {followed.response.sample_index} to `{followed.prompt.prompt_id}`.\n{TOKENS}",
        table(("token", "piece", "block", "advantage", "weight", "old log-prob"), token_rows(run, followed)),
        "## 5. Loss and gradient", loss_text(parts, norm, mini_batch),
        "## 6. New weights", SYNCED,
        f"* `decoder.final_layernorm.weight[0]`: {before:.6f} → {one_weight(run):.6f}\n"
        f"* bytes that travelled between ranks: {traffic['reshard/bytes']:,} (one process: everything is copied in place)\n"
        f"* version of the engine's weights: {run.engine.weights_version}",
    )  # fmt: skip
    return "\n\n".join(sections) + "\n"


HEAD = """# One step, with its numbers

<!-- made by tools/one_step.py; a test makes it again and compares -->

A training step of the quickstart's DCPO, cut to two prompts and four responses each, followed from
the prompts to the new weights. The functions are those of `training/loop.py`, in its order. One
response is one `TrainingSample` (`training/sampling.py`) all the way: every stage returns a copy
with its own fields filled."""
JUDGED = """`sample_step` calls two functions: `roll_out` samples with the engine and hands each response to the
judge; `gather_judged` collects all ranks' responses as `TrainingSample(prompt, response,
judgement)`. R is the correctness, c the stated confidence; tokens before the boundary reason, those
from it on state the confidence."""
SCORED = """`MiniBatch.of` deals the responses to the data-parallel ranks, `with_old_logprobs` fills the
log-probs of the policy that sampled, `score` the rest: the target mixes the group's accuracy with R
(lambda 0.5), R_c = -|c - target|, and both rewards are normalised within the group (mean 0,
deviation 1)."""
TOKENS = """A_r stands on its reasoning tokens, A_c on its confidence tokens; the weight is the token's share of
the loss, 1 / (responses x tokens of the response) (`Objective.token_weights`). `token_batch` puts
these columns beside the log-probs of the forward pass, and `micro_batch_loss` sums weight x clipped
loss."""
SYNCED = """The optimizer moves the policy and `synchronize_engine` hands the new weights to the engine, which
from then on samples the next step's responses."""


def table(header: Sequence[str], rows: Any) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def prompt_row(prompt: Any) -> tuple[Any, ...]:
    return f"`{prompt.prompt_id}`", code(prompt.messages[-1]["content"]), len(prompt.token_ids), prompt.ground_truth


def judged_row(run: TrainingRun, sample: TrainingSample) -> tuple[Any, ...]:
    judgement = sample.judgement
    stated = "–" if judgement.confidence is None else f"{judgement.confidence:g}"
    place = f"{judgement.boundary} / {judgement.length}"
    return (
        *key(sample),
        code(run.tokenizer.decode(sample.response_ids.tolist())),
        f"{judgement.correct:.0f}",
        stated,
        judgement.status,
        place,
    )


def reward_row(sample: TrainingSample) -> tuple[Any, ...]:
    assert sample.tokens is not None
    boundary = int((sample.tokens.block_ids == BLOCKS["reasoning"]).sum())
    a_r, a_c = sample.tokens.advantages[0], sample.tokens.advantages[min(boundary, len(sample.tokens.advantages) - 1)]
    return (*key(sample), f"{sample.R:.0f}", f"{sample.R_c:+.4f}", f"{a_r:+.4f}", f"{a_c:+.4f}")


def token_rows(run: TrainingRun, sample: TrainingSample) -> list[tuple[Any, ...]]:
    assert sample.tokens is not None
    assert sample.weights is not None
    assert sample.old_logprobs is not None
    names = {number: name for name, number in BLOCKS.items()}
    columns = (sample.tokens.block_ids, sample.tokens.advantages, sample.weights, sample.old_logprobs)
    return [
        (i, code(run.tokenizer.decode([int(t)])), names[int(b)], f"{a:+.4f}", f"{w:.5f}", f"{lp:+.3f}")
        for i, (t, b, a, w, lp) in enumerate(zip(sample.response_ids, *columns, strict=True))
    ]


def loss_text(parts: Sequence[dict[str, float]], norm: float, mini_batch: MiniBatch) -> str:
    tokens = {block: sum(part[f"tokens/{block}"] for part in parts) for block in BLOCKS}
    return (
        f"`accumulate` runs {len(mini_batch.micro_batches)} micro-batch(es) through Megatron's schedule: "
        f"{tokens['reasoning']:.0f} reasoning and {tokens['confidence']:.0f} confidence\ntokens.\n\n"
        f"* loss: {sum(part['loss'] for part in parts):+.5f} (the ratio is 1: minus the weighted sum of the advantages)\n"
        f"* gradient norm: {norm:.4f}"
    )


def key(sample: TrainingSample) -> tuple[str, int]:
    return f"`{sample.prompt.prompt_id}`", sample.response.sample_index


def one_weight(run: TrainingRun) -> float:
    return run.policy.gpt[0].decoder.final_layernorm.weight[0].item()


def code(text: str) -> str:
    """``text`` inside a table cell."""
    return "`" + text.replace("\n", "⏎").replace("|", "¦") + "`" if text.strip() else "`⏎`" if "\n" in text else "` `"


if __name__ == "__main__":
    main()
