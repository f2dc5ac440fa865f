"""A policy that thinks, end to end: trained, validated, judged again and evaluated behind its
end-of-thinking token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dcpo.evaluation.samples import read_samples
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import metrics, run, train

HELDOUT = QUICKSTART / "data" / "heldout.jsonl"
TAGS = ("<think>", "</think>")
VERIFIER = '''
def verify(response, answer):
    """The answer alone, as the policy writes it after its thinking."""
    assert "think>" not in response
    return response.replace("\\\\boxed{", "").replace("}", "").strip() == answer
'''


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy with two more tokens. ``</think>`` has the vector of the token that
    opens a box, so that it stands in half of the responses, behind the digits and before the
    answer.
    """
    path = tmp_path_factory.mktemp("thinking") / "policy"
    shutil.copytree(QUICKSTART / "policy", path)
    spec = json.loads((path / "tokenizer.json").read_text())
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    spec["added_tokens"] += [{"id": 282 + n, "content": tag, **plain} for n, tag in enumerate(TAGS)]
    (path / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 284}))
    tensors = load_file(path / "model.safetensors")
    words = tensors["model.embed_tokens.weight"]
    box = spec["model"]["vocab"]["\u0120\\boxed{"]
    tensors["model.embed_tokens.weight"] = torch.cat([words, words[281:282], words[box : box + 1]])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_policy_that_thinks(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(VERIFIER)
    own = f"{tmp_path / 'my_reward.py'}:verify"
    rows = train(
        tmp_path / "run",
        *(
            f"model.path={policy}",
            "data.thinking=on",
            f"judging.verifier={own}",
            "training.steps=2",
        ),
        *(
            "evaluation.interval=2",
            f"evaluation.benchmarks=heldout={HELDOUT}",
            "evaluation.limit=8",
        ),
        *("logging.samples_interval=1", "training.save_interval=0"),
    )
    trained = [row for row in rows if row["step"]]
    assert len(trained) == 2
    for row in trained:
        assert 1 < row["length/thinking"] < row["length/mean"]
        assert row["rollout/unjudged"] == 0
        assert row["reward/accuracy"] > 0
        assert row["format/violation_rate"] < 1
    logged = [
        json.loads(line)
        for file in sorted((tmp_path / "run" / "samples").glob("*.jsonl"))
        for line in file.open()
    ]
    blocks = {block for row in logged for text, block, _ in row["pieces"] if "</think>" in text}
    assert blocks == {"reasoning"}

    validated = tmp_path / "run" / "evaluation" / "step_000002.jsonl"
    samples = read_samples(validated)
    thinking = [sample for sample in samples if "</think>" in sample.response.text]
    assert 0 < len(thinking) < len(samples)
    for sample in samples:
        text = sample.response.text
        ends = text.find(TAGS[1]) + len(TAGS[1]) if sample in thinking else 0
        judgement = sample.judgement
        assert judgement.thinking_characters == ends
        if ends:
            assert 0 < judgement.thinking_tokens <= judgement.boundary
        else:
            assert judgement.thinking_tokens == 0
    assert any(sample.correct or sample.judgement.status == "ok" for sample in thinking)
    lengths = [sample.judgement.thinking_tokens for sample in thinking]
    assert metrics(tmp_path / "run")[-1]["evaluation/heldout/mean_thinking"] == sum(lengths) / len(
        lengths
    )

    again = tmp_path / "again"
    done = run(
        "evaluate",
        "--samples",
        validated,
        "--rejudge",
        "--verifier",
        own,
        "--out",
        again,
        "--resamples",
        0,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = read_samples(again / "samples.jsonl")
    assert [(s.correct, s.judgement.confidence, s.judgement.status) for s in found] == [
        (s.correct, s.judgement.confidence, s.judgement.status) for s in samples
    ]

    out = tmp_path / "evaluated"
    done = run(
        *(
            "evaluate",
            "--model",
            tmp_path / "run" / "policy",
            "--as-trained",
            tmp_path / "run" / "config.yaml",
        ),
        *(
            "--benchmarks",
            f"heldout={HELDOUT}",
            "--limit",
            8,
            "--repeats",
            1,
            "--out",
            out,
            "--resamples",
            0,
        ),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((out / "settings.json").read_text())["thinking"] == "on"
    assert json.loads((out / "evaluation.json").read_text())["overall"]["mean_thinking"] > 1


@pytest.mark.parametrize("verb", ["train", "dry-run", "evaluate"])
def test_on_is_refused_where_the_tokenizer_cannot_end_it(verb: str, tmp_path: Path) -> None:
    config, policy = QUICKSTART / "dcpo.yaml", QUICKSTART / "policy"
    command = {
        "train": ("train", "--config", config, f"run_dir={tmp_path}/run", "data.thinking=on"),
        "dry-run": ("train", "--config", config, "--dry-run", "data.thinking=on"),
        "evaluate": (
            "evaluate",
            "--model",
            policy,
            "--thinking",
            "on",
            "--template",
            "raw",
            "--out",
            tmp_path / "out",
            "--benchmarks",
            f"heldout={HELDOUT}",
        ),
    }[verb]
    done = run(*command)
    assert done.returncode == 2
    assert "thinking=on: the tokenizer of" in done.stderr
    assert "has no end-of-thinking token (</think>, " in done.stderr
    assert "Traceback" not in done.stderr
