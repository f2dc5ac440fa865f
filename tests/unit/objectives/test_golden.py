"""Every number of the golden group: eight responses of one prompt, worked out independently of this
package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dcpo.cli import objective as verb
from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING
from tests.helpers.objective_cases import (
    EXPECTED,
    GOLDEN_OPTIONS,
    INPUTS,
    NEW,
    OLD,
    golden_judgements,
    loss_and_gradient,
    objective,
    score,
    token_batch,
    with_tokens,
)

COLUMNS = {
    "target": ("targets",),
    "R": ("R",),
    "R_c": ("R_c",),
    "A_r": ("A_r",),
    "A_c": ("A_c",),
    "A": ("A_r", "A_c"),
}


@pytest.mark.parametrize("name", GOLDEN_OPTIONS)
def test_rewards_advantages_and_loss(name: str) -> None:
    expected, chosen = EXPECTED[name], objective(**GOLDEN_OPTIONS[name])
    scored = score(chosen, golden_judgements(), OLD)
    for key, columns in COLUMNS.items():
        for column in columns if key in expected else ():
            np.testing.assert_allclose(getattr(scored, column), expected[key], rtol=0, atol=1e-9)
    loss, _ = loss_and_gradient(chosen)
    assert loss == pytest.approx(expected["loss"], abs=1e-9)


@pytest.mark.parametrize("name", GOLDEN_OPTIONS)
def test_loss_in_float32(name: str) -> None:
    loss, _ = loss_and_gradient(objective(**GOLDEN_OPTIONS[name]), dtype=torch.float32)
    assert loss == pytest.approx(EXPECTED[name]["loss"], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in GOLDEN_OPTIONS if "clipped" in EXPECTED[name]])
def test_clipped_tokens_are_counted(name: str) -> None:
    chosen = objective(**GOLDEN_OPTIONS[name])
    scored = score(chosen, golden_judgements(), OLD)
    _, stats = chosen.loss(*token_batch(scored.samples))
    assert stats["clipped/reasoning"] + stats["clipped/confidence"] == EXPECTED[name]["clipped"]


def test_ccgspg_parts() -> None:
    """pg + beta * reg, and the sequence confidences behind them."""
    expected = EXPECTED["ccgspg beta=0.01"]
    np.testing.assert_allclose([np.exp(row.mean()) for row in OLD], expected["c_old"], atol=1e-12)
    loss, _ = loss_and_gradient(objective(name="ccgspg", beta=0.0))
    assert loss == pytest.approx(expected["pg"], abs=1e-9)


def test_released_code_taken_literally_gives_another_loss() -> None:
    """Negative control: blocks swapped and starting two tokens early is what the released code
    does, 0.1001.

    It halves R_c before the normalisation, which counts only against eps: as if that were 2e-6.
    """
    chosen = objective(preset="verl_compat")
    scored = score(chosen, golden_judgements(), OLD)
    A_c = score(objective(preset="verl_compat", eps=2e-6), golden_judgements()).A_c
    advantages, blocks = [], []
    for i, (tokens, n_reasoning) in enumerate(zip(scored.samples, INPUTS["n_reason"], strict=True)):
        length = len(tokens.block_ids)
        start = (n_reasoning if INPUTS["n_conf"][i] else length) - 2
        early = np.arange(length) >= start
        advantages.append(np.where(early, scored.A_r[i], A_c[i]))
        blocks.append(np.where(early, BLOCK_CONFIDENCE, BLOCK_REASONING))
    loss, _ = loss_and_gradient(chosen, samples=with_tokens(scored, advantages, blocks))
    assert loss == pytest.approx(
        EXPECTED["dcpo lam=0.5 [HEAD literal, negative control]"]["loss"], abs=1e-9
    )
    assert abs(loss - EXPECTED["dcpo lam=0.5 [verl]"]["loss"]) > 0.1


def group_json(name: str) -> dict[str, object]:
    options = dict(GOLDEN_OPTIONS[name])
    responses = [
        {
            "prompt_id": "p0",
            "correct": int(INPUTS["correct"][i]),
            "confidence": INPUTS["conf"][i],
            "status": INPUTS["status"][i],
            "boundary": golden_judgements()[i].boundary,
            "length": golden_judgements()[i].length,
            "old_logprobs": INPUTS["old"][i],
            "logprobs": INPUTS["new"][i],
        }
        for i in range(len(OLD))
    ]
    return {"method": options.pop("name", "dcpo"), "options": options, "responses": responses}


@pytest.mark.parametrize("name", GOLDEN_OPTIONS)
def test_the_verb_gives_the_same_numbers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "group.json"
    source.write_text(json.dumps(group_json(name)))
    parser = argparse.ArgumentParser()
    verb.add_parser(parser.add_subparsers())
    args = parser.parse_args(["objective", "--input", str(source), "--json"])
    assert args.run(args) == 0
    result, expected = json.loads(capsys.readouterr().out), EXPECTED[name]
    assert set(result) == {"targets", "R", "R_c", "advantages", "token_advantages", "loss"}
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    for key in ("A", "A_r"):
        if key in expected:
            np.testing.assert_allclose(result["advantages"]["reasoning"], expected[key], atol=1e-9)
    assert [len(row) for row in result["token_advantages"]] == [len(row) for row in NEW]


def test_example_token_advantages_of_the_specification() -> None:
    """Paper, lam .5: response 0 has five and three, 3 has its EOS as block, 7 (truncated) has no
    block.
    """
    scored = score(objective(), golden_judgements())
    for i, (A_r, n_r, A_c, n_c) in {
        0: (0.999998000004, 5, 1.0270730987, 3),
        3: (-0.999998000004, 6, -1.2258614404, 1),
        7: (-0.999998000004, 8, 0.0, 0),
    }.items():
        np.testing.assert_allclose(
            scored.samples[i].advantages, [A_r] * n_r + [A_c] * n_c, atol=1e-9
        )
