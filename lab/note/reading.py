"""What a policy shows of texts in one prefill, readers that are fitted on them, and the numbers
that it writes behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.fitted import LEAST_LOGPROB
from lab.note.transcripts import ASKS, OPENS, Seen, Transcripts
from megatron_dcpo.judging.confidence import parse_confidence

BATCH = 512  # texts of a prefill
RANK = 16
EPOCHS = 12
PER_STEP = 128
MOST_WRITTEN = 12  # tokens behind the tag

# the logits [N] of a batch, its labels [N] and the numbers of its problems [N] -> what is minimized
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Policy:
    """A policy in the Hugging Face format, with its tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def batches(self, texts: Sequence[str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tokens [B, T] of texts, padded on the right, and their counts [B]."""
        for start in range(0, len(texts), BATCH):
            yield self.padded(texts[start : start + BATCH])

    def padded(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens [B, T] of texts, padded on the right, and their counts [B]. Padding is
        seen by no token of a causal model before it.
        """
        ids = self.tokenizer(list(texts), padding=True, padding_side="right", return_tensors="pt")
        return ids["input_ids"], ids["attention_mask"].sum(dim=1)

    def seen(self, transcripts: Transcripts) -> Seen:
        """Return transcripts with what the policy shows of them."""
        before = transcripts.before_note
        opened = [text + OPENS for text in before]
        boxes = [text[: text.rfind("{") + 1] for text in before]
        closed = [number + "}" for number in transcripts.note]
        has_note = np.array([bool(number) for number in transcripts.note])
        has_box = np.array([bool(box) for box in transcripts.box])
        note_logprob = self.logprobs(opened, transcripts.note)
        box_logprob = self.logprobs(
            [box or opening for box, opening in zip(boxes, opened, strict=True)], closed
        )
        return Seen(
            transcripts=transcripts,
            note_logprob=np.where(has_note, note_logprob, LEAST_LOGPROB),
            box_logprob=np.where(has_note & has_box, box_logprob, LEAST_LOGPROB),
            state=self.states(transcripts.asking),
        )

    @torch.no_grad()
    def states(self, texts: Sequence[str]) -> np.ndarray:
        """Return the last layer's state [N, H] at the last token of each text."""
        found = [
            _last(self.model.model(input_ids=ids).last_hidden_state, counts)
            for ids, counts in self.batches(texts)
        ]
        return torch.cat(found).numpy()

    @torch.no_grad()
    def logprobs(self, before: Sequence[str], texts: Sequence[str]) -> np.ndarray:
        """Return the log-prob (nats) [N] of each text behind the one before it. No token may cross
        the border.
        """
        whole = [first + second for first, second in zip(before, texts, strict=True)]
        starts = torch.tensor([len(ids) for ids in self.tokenizer(list(before))["input_ids"]])
        found = []
        done = 0
        for ids, counts in self.batches(whole):
            of_batch = starts[done : done + len(ids), None]
            done += len(ids)
            logprobs = self.model(input_ids=ids).logits[:, :-1].log_softmax(dim=-1)
            of_next = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
            place = torch.arange(1, ids.shape[1])
            is_text = (place >= of_batch) & (place < counts[:, None])
            found.append((of_next * is_text).sum(dim=1))
        return torch.cat(found).double().numpy()

    @torch.no_grad()
    def written(self, asking: Sequence[str], seed: int | None = None) -> np.ndarray:
        """Return the confidence [N] that is written behind each text, NaN where it cannot be read:
        at temperature 0, or with a seed at temperature 1.
        """
        how = {"do_sample": seed is not None, "max_new_tokens": MOST_WRITTEN}
        if seed is not None:
            torch.manual_seed(seed)
        found: list[float] = []
        for start in range(0, len(asking), BATCH):
            texts = list(asking[start : start + BATCH])
            ids = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
            whole = self.model.generate(**ids, **how)
            found += [self._stated(row) for row in whole[:, ids["input_ids"].shape[1] :]]
        return np.array(found)

    def _stated(self, tokens: torch.Tensor) -> float:
        end = self.tokenizer.eos_token_id
        finished = end in tokens.tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        confidence = parse_confidence(ASKS + text, finished=finished).confidence
        return np.nan if confidence is None else confidence


class LowRank(nn.Module):
    """A frozen linear layer with a low-rank addition, which begins at 0."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(x))
        frozen: torch.Tensor = self.linear(x)
        return frozen + added


class Reader(nn.Module):
    """A policy with an adapter of all its linear layers, and a line on its last state."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.policy = Policy(directory)
        self.layers: nn.Module = self.policy.model.model
        self.layers.requires_grad_(False)
        for module in list(self.layers.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, LowRank(child))
        self.line = nn.Linear(self.policy.model.config.hidden_size, 1)
        nn.init.zeros_(self.line.weight)
        nn.init.zeros_(self.line.bias)

    def forward(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the logits [B] of texts."""
        ids, counts = self.policy.padded(texts)
        logits: torch.Tensor = self.line(_last(self.layers(input_ids=ids)[0], counts))
        return logits[:, 0]

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> np.ndarray:
        """Return the logits [N] of texts."""
        starts = range(0, len(texts), BATCH)
        return torch.cat([self(texts[start : start + BATCH]) for start in starts]).numpy()


@dataclass(frozen=True)
class Lesson:
    """Hold what a reader learns: texts [N], whether their answers are right, their problems, which
    follow each other, and the loss.
    """

    texts: Sequence[str]
    correct: np.ndarray
    problem: np.ndarray
    loss: Loss

    def steps(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the rows of each step of an epoch; the answers to a problem stay together."""
        _, first, counts = np.unique(self.problem, return_index=True, return_counts=True)
        order = rng.permutation(len(first))
        rows = [np.arange(start, start + count) for start, count in zip(first, counts, strict=True)]
        steps = max(1, len(self.texts) // PER_STEP)
        return [np.concatenate([rows[n] for n in part]) for part in np.array_split(order, steps)]


def fitted(directory: Path, lesson: Lesson, learning_rate: float, seed: int = 1) -> Reader:
    """Return a reader of the policy in ``directory`` that has learned the lesson."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    reader = Reader(directory)
    learned = [weight for weight in reader.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=learning_rate, weight_decay=0.0)
    steps = [rows for _ in range(EPOCHS) for rows in lesson.steps(rng)]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(steps))
    correct = torch.tensor(lesson.correct, dtype=torch.float32)
    problem = torch.tensor(lesson.problem)
    for rows in steps:
        logits = reader([lesson.texts[row] for row in rows])
        optimizer.zero_grad()
        lesson.loss(logits, correct[rows], problem[rows]).backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()
    return reader


def cross_entropy(
    logits: torch.Tensor, correct: torch.Tensor, problem: torch.Tensor
) -> torch.Tensor:
    """Return the cross-entropy of the verdicts."""
    return functional.binary_cross_entropy_with_logits(logits, correct)


def pairs_within_problems(
    logits: torch.Tensor, correct: torch.Tensor, problem: torch.Tensor
) -> torch.Tensor:
    """Return -log sigmoid(logit of the right answer - logit of the wrong one), the mean over the
    pairs of a right and a wrong answer to one problem.
    """
    is_pair = (problem[:, None] == problem) & (correct[:, None] == 1) & (correct == 0)
    gaps = logits[:, None] - logits
    return functional.softplus(-gaps[is_pair]).sum() / is_pair.sum().clamp(min=1)


def _last(states: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the states [B, H] of the last tokens of [B, T, H]."""
    return states[torch.arange(len(counts)), counts - 1]
