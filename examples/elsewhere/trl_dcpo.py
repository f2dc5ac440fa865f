"""DCPO in TRL: GRPOTrainer with an advantage for each block of a response, and calibration in its
logs (TRL 1.16).

    python examples/elsewhere/trl_dcpo.py --steps 40 --out runs/trl_dcpo

trains the quickstart's policy on a CPU. The data needs a column ``answer``; the reward function is
only logged, since the advantages are computed here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import dcpo
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from megatron_dcpo.judging.token_bytes import token_bytes

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"


class DCPOTrainer(GRPOTrainer):
    """GRPOTrainer whose advantages are DCPO's, [B, T]. The completions of a prompt have to be on
    one process: ``per_device_train_batch_size`` x accumulation is a multiple of
    ``num_generations``.
    """

    objective = dcpo.method("dcpo")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        ids, mask = batch["completion_ids"], batch["completion_mask"].bool()
        completions = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        tokenizer = self.processing_class
        scored = dcpo.score(
            completions,
            answers=[row["answer"] for row in inputs],
            groups=[str(index // self.num_generations) for index in range(len(inputs))],
            tokens=token_bytes(tokenizer),
            eos_ids={tokenizer.eos_token_id},
            objective=self.objective,
        )
        advantages = dcpo.padded(scored.advantages, ids.shape[1])
        batch["advantages"] = torch.tensor(advantages, dtype=torch.float32, device=ids.device)
        mode = "train" if self.model.training else "eval"
        for name, value in dcpo.metrics(scored.judgements).items():
            self._metrics[mode][name].append(value)
        return batch


def logged_only(completions: list[str], **_: Any) -> list[float]:
    """The reward that TRL asks for, by which nothing is trained."""
    return [0.0] * len(completions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/trl_dcpo"))
    args = parser.parse_args()
    rows = (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()
    problems = [json.loads(row) for row in rows]
    options = GRPOConfig(
        output_dir=str(args.out),
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=32,
        temperature=1.0,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        beta=0.0,
        disable_tqdm=True,
    )
    trainer = DCPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(QUICKSTART / "policy", dtype=torch.float32),
        reward_funcs=logged_only,
        args=options,
        train_dataset=Dataset.from_list(
            [{"prompt": p["problem"], "answer": p["answer"]} for p in problems]
        ),
        processing_class=AutoTokenizer.from_pretrained(QUICKSTART / "policy"),
    )
    trainer.train()
    args.out.mkdir(parents=True, exist_ok=True)
    history = trainer.state.log_history
    (args.out / "log_history.json").write_text(json.dumps(history, indent=1))


if __name__ == "__main__":
    main()
