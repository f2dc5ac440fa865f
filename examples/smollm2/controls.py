"""Confidences that need the policy itself, of a real model: linear probes on its hidden states, and
P(true).

``python examples/smollm2/controls.py --runs runs/smollm2 --methods grpo,dcpo`` reads
``METHOD/validation/samples.jsonl`` and the other evaluations beside it, runs the policy over every
response once more, and writes ``METHOD/PART/controls.json``: lists in the order of the samples.
Whatever is fitted is fitted on the validation problems; what it says of these themselves was fitted
on the others of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.evaluation.samples import Sample, read_samples

PARTS = ("test", "ood", "validation")
PROBES = ("prompt", "response")
QUESTION = "Is this answer correct? Reply with Yes or No."
BATCH = 64


def write_controls(runs: Path, method: str, parts: Sequence[str]) -> None:
    """Write the controls of one policy for the ``parts`` that were evaluated; ``validation`` must
    be one of them.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = runs / "policy" if method == "base" else runs / method / "policy"
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    samples = {
        part: list(read_samples(path))
        for part in parts
        if (path := _samples(runs, method, part)).is_file()
    }
    found = {part: _passes(model, tokenizer, of) for part, of in samples.items()}
    fitted = {name: _probe(found["validation"][name], samples["validation"]) for name in PROBES}
    for part, values in found.items():
        written = {}
        for name in PROBES:
            if part == "validation":
                predicted = _cross_fitted(values[name], samples[part])
            else:
                predicted = fitted[name].predict_proba(values[name])[:, 1]
            written[f"{name} probe"] = predicted.tolist()
        written["P(true)"] = values["p_true"].tolist()
        _samples(runs, method, part).with_name("controls.json").write_text(json.dumps(written))
        logging.info("%s/%s: %d responses", method, part, len(samples[part]))


def _samples(runs: Path, method: str, part: str) -> Path:
    return runs / method / part / "samples.jsonl"


def _passes(model: Any, tokenizer: Any, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the last layer's hidden state at the end of the prompt and of the reasoning, [N, H]
    each, and P(true) [N]: the probability of Yes against No after a second request.
    """
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))

    def ids(turns: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))

    prompts, answered, asked = [], [], []
    for s in samples:
        # the confidence line is cut off: the probe reads the reasoning and the boxed answer
        turn, said = (
            {"role": "user", "content": s.prompt.problem},
            s.response.text.partition("<conf>")[0].rstrip(),
        )
        prompts.append(ids([turn]))
        answered.append(prompts[-1] + tokenizer.encode(said, add_special_tokens=False))
        again = [
            turn,
            {"role": "assistant", "content": said},
            {"role": "user", "content": QUESTION},
        ]
        asked.append(ids(again))
    ends = [
        (len(prompt) - 1, len(whole) - 1) for prompt, whole in zip(prompts, answered, strict=True)
    ]
    states = np.array(_states(model, answered, ends))
    last = np.array(_states(model, asked, [(len(whole) - 1,) for whole in asked]))[:, 0]
    head = model.lm_head.weight.detach().float().numpy()
    p_true = 1 / (1 + np.exp(last @ (head[no] - head[yes])))
    return {"prompt": states[:, 0], "response": states[:, 1], "p_true": p_true}


def _states(
    model: Any, sequences: Sequence[list[int]], places: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Return the last layer's hidden states of each sequence of token ids at its places, [places,
    H].
    """
    import torch

    found: list[Any] = [None] * len(sequences)
    by_length = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    for start in range(0, len(sequences), BATCH):
        batch = by_length[start : start + BATCH]
        width = max(len(sequences[i]) for i in batch)
        tokens = torch.tensor([sequences[i] + [0] * (width - len(sequences[i])) for i in batch])
        mask = torch.tensor(
            [[1] * len(sequences[i]) + [0] * (width - len(sequences[i])) for i in batch]
        )
        with torch.inference_mode():
            hidden = model.model(tokens, attention_mask=mask).last_hidden_state
        for row, i in enumerate(batch):
            found[i] = hidden[row, list(places[i])].float().numpy()
    return found


def _probe(hidden: np.ndarray, samples: Sequence[Sample]) -> Any:
    """Return a logistic regression on standardized states; its penalty is chosen by five folds of
    the problems.
    """
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    right = np.array([s.correct for s in samples])
    folds = _folds(hidden, samples)
    regression = LogisticRegressionCV(
        Cs=np.logspace(-5, 0, 6), cv=folds, scoring="neg_log_loss", max_iter=2000
    )
    return make_pipeline(StandardScaler(), regression).fit(hidden, right)


def _cross_fitted(hidden: np.ndarray, samples: Sequence[Sample]) -> np.ndarray:
    """Return what probes that were fitted on other problems say of each sample [N]."""
    predicted = np.zeros(len(samples))
    for others, inside in _folds(hidden, samples):
        probe = _probe(hidden[others], [samples[row] for row in others])
        predicted[inside] = probe.predict_proba(hidden[inside])[:, 1]
    return predicted


def _folds(hidden: np.ndarray, samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows outside and inside of each of five parts of the problems."""
    from sklearn.model_selection import GroupKFold

    problems = [s.prompt.prompt_id for s in samples]
    return list(GroupKFold(5).split(hidden, groups=problems))


def main() -> None:
    """Write the controls of every method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, required=True, help="the evaluated runs, for instance runs/smollm2"
    )
    parser.add_argument("--methods", default="grpo,dcpo", help="default: %(default)s")
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for method in args.methods.split(","):
        write_controls(args.runs, method, PARTS)


if __name__ == "__main__":
    main()
