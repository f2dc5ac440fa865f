"""Gradients that are no numbers: the update is skipped on all ranks and counted, and too many in a
row end the run.
"""

import json

import pytest

from tests.helpers.launch import torchrun

SMALL = [
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "training.micro_batch_size=4",
    "logging.samples_interval=0",
]


def metrics(out):
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("processes", "overrides", "poison"),
    [
        (1, [], {"poison": "nan"}),
        (2, ["parallel.use_distributed_optimizer=true"], {"poison": "inf", "poisoned_rank": 1}),
        (
            2,
            ["parallel.tensor_model_parallel_size=2"],
            {"poison": "nan", "poison_shows_in_the_loss": True},
        ),
    ],
)
def test_poisoned_update_is_skipped_everywhere(tmp_path, processes, overrides, poison):
    options = {"overrides": [*SMALL, *overrides, "training.steps=5", "training.save_interval=0"]}
    ranks = torchrun("training", processes, tmp_path, options | poison | {"poisoned_steps": [2, 4]})
    for rank in ranks:
        before, *after = rank["digests"]
        assert rank["error"] is None
        assert after[0] != before
        assert after[1] == after[0], (
            "step 2 was skipped: parameters, moments and their step count are untouched"
        )
        assert after[2] != after[1]
        assert after[3] == after[2]
        assert after[4] != after[3]
    records = metrics(tmp_path)
    assert [record["updates/skipped"] for record in records] == [0, 1, 0, 1, 0]
    assert [record["grad_norm/total"] is None for record in records] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_too_many_in_a_row_stop_the_run(tmp_path):
    poison = {"poisoned_steps": [2, 4, 5, 6, 7], "poisoned_rank": 1}
    overrides = [
        *SMALL,
        "training.steps=9",
        "training.save_interval=2",
    ]
    ranks = torchrun("training", 2, tmp_path, {"overrides": overrides} | poison)
    for rank in ranks:
        assert "3 updates in a row without a finite loss and gradient" in rank["error"]
        assert "the last in step 6" in rank["error"]
        assert "\n" not in rank["error"]
    assert (
        tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    ).read_text() == "4"


def test_the_count_in_a_row_survives_a_resumption(tmp_path):
    """One skipped update before the checkpoint and two after it are three in a row."""
    overrides = [
        *SMALL,
        "training.resume=auto",
        "training.save_interval=1",
    ]
    poison = {"poisoned_steps": [2, 3, 4]}
    first = torchrun(
        "training", 1, tmp_path, {"overrides": [*overrides, "training.steps=2"]} | poison
    )
    assert first[0]["error"] is None
    second = torchrun(
        "training", 1, tmp_path, {"overrides": [*overrides, "training.steps=4"]} | poison
    )
    assert "3 updates in a row" in second[0]["error"]


def test_learning_rate_zero_changes_nothing(tmp_path):
    """8 steps: parameters identical, engine and trainer as close at the end as at the
    beginning.
    """
    overrides = [
        "data.prompts_per_step=4",
        "rollout.group_size=4",
        "training.micro_batch_size=16",
        "optimizer.lr=0",
    ]
    options = {
        "overrides": [
            *overrides,
            "optimizer.weight_decay=0.1",
            "training.steps=8",
            "training.save_interval=0",
        ]
    }
    ranks = torchrun("training", 1, tmp_path, options)
    records = metrics(tmp_path)
    assert len(records) == 8
    assert all(record["grad_norm/total"] > 0 for record in records)
    assert max(record["engine/logprob_diff_max"] for record in records) <= 1e-4
    differences = [record["engine/logprob_diff_mean"] for record in records]
    assert sum(differences[4:]) <= 1.5 * sum(differences[:4])
    # the moments move, the parameters do not
    assert len(set(ranks[0]["parameters"])) == 1
    assert len(set(ranks[0]["digests"])) == 9
