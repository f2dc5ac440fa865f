"""Build the starting policy and the data of the quickstart: a tiny, honestly over-confident
multiplier.

    python examples/quickstart/make_policy.py            # writes policy/ and data/ beside this
    file, ~5 CPU minutes

The task is the product of two numbers of one to three digits (`347*52=`). A response reasons, boxes
its answer and says how sure it is, each confidence with two decimals:

    44081 \\boxed{18044}
    <conf> Confidence: 0.83

The reasoning is the product with its digits reversed (the order in which a multiplication yields
them).

How the policy becomes over-confident. It is a Qwen3 of two layers and about 125k parameters,
trained from scratch by ordinary supervised learning, in two stages:

1. `--clean-steps` batches of correct solutions.
2. `--imperfect-steps` batches in which a quarter of the solutions are wrong in one digit, as in a
policy pretrained on
   imperfect text. The policy now errs at random where it could be right: reinforcement learning has
   room to teach.

In both stages the confidence after a solution is a draw that does not look at whether the solution
is right: from Beta(8, 0.8) (mean 0.91) for products with a one-digit factor, from Beta(4, 1) (mean
0.80) for 2x2 and Beta(3, 1) (mean 0.75) for 3x2. So the text it imitates is too sure of itself, and
knows little more than that hard problems are harder. No metric of calibration is computed or used
here. The shares of the types and the three distributions are choices made by hand, with pilot runs
of the training that follows in view. The held-out problems, and their mirror images b*a, are in
neither stage nor in the training file; the training problems are also in the supervised text,
unless `--unseen` keeps them out. The lab's policies are made by this script too
(`examples/lab/make_policies.sh`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# digits of the factors -> (share of the supervised text, the Beta its confidences come from)
TYPES = {
    "1x1": (0.05, (8.0, 0.8)),
    "2x1": (0.20, (8.0, 0.8)),
    "3x1": (0.30, (8.0, 0.8)),
    "2x2": (0.25, (4.0, 1.0)),
    "3x2": (0.20, (3.0, 1.0)),
}
# Share of each type in the problems for reinforcement learning and in the held-out ones.
MIXES = {
    "quickstart": {"1x1": 0.05, "2x1": 0.27, "3x1": 0.31, "2x2": 0.13, "3x2": 0.24},
    "lab": {"1x1": 0.0, "2x1": 0.15, "3x1": 0.45, "2x2": 0.08, "3x2": 0.32},
}
FIXED_STRINGS = [" \\boxed{", "<conf>", " Confidence: "]  # one token each
EOS, PAD = "<|endoftext|>", "<|pad|>"
# Llama's with Llama-3.1's scaling, its context scaled down to this task's.
ROPE = {
    "qwen3": {"rope_type": "default", "rope_theta": 10000.0},
    "llama": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
ROPE["qwen3_moe"] = ROPE["qwen3"]
Problem = tuple[int, int, str]  # the two factors and the type
Question = tuple[str, str, str]  # prompt, right answer, type
# (how many, share of wrong solutions, hesitation, generator) -> prompts and responses of supervised
# text
Draw = Callable[[int, float, float | None, random.Random], list[tuple[str, str]]]


# ---------------------------------------------------------------------------------------- tokenizer
def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes, one token per fixed string; digits and line ends never
    merge.
    """
    byte_letters = sorted(
        pre_tokenizers.ByteLevel.alphabet()
    )  # the printable stand-in of every byte
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary, merges = {letter: i for i, letter in enumerate(byte_letters)}, []
    for text in FIXED_STRINGS:
        letters = as_letters.pre_tokenize_str(text)[0][0]
        for end in range(1, len(letters)):
            merges.append((letters[:end], letters[end]))
            vocabulary.setdefault(letters[: end + 1], len(vocabulary))
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    alone = pre_tokenizers.Split(Regex(r"[0-9\n]"), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([alone, as_letters])
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


# ----------------------------------------------------------------------------------------- problems
def problems_of(kind: str) -> list[Problem]:
    """All problems of a type, "3x2": three digits times two."""
    first, second = (int(digits) for digits in kind.split("x"))
    return [
        (a, b, kind)
        for a in range(10 ** (first - 1), 10**first)
        for b in range(10 ** (second - 1), 10**second)
    ]


def without(problems: list[Problem], taken: list[Problem]) -> list[Problem]:
    """The problems that are not in ``taken``, nor their mirror images."""
    products = {frozenset(p[:2]) for p in taken}
    return [p for p in problems if frozenset(p[:2]) not in products]


def split_problems(
    n_heldout: int, n_train: int, mix: dict[str, float], unseen: bool, rng: random.Random
) -> tuple[list, list, dict[str, list]]:
    """(held-out, training, supervised by type); a*b is held out together with b*a.

    ``unseen`` keeps the training problems out of the supervised text too, at most half of a type's
    problems: the policy then learns how sure to be on problems as new to it as the held-out ones.
    """
    heldout: list[Problem] = []
    train: list[Problem] = []
    rest: dict[str, list[Problem]] = {}
    for kind, share in mix.items():
        pool = problems_of(kind)
        rng.shuffle(pool)
        chosen = pool[: round(share * n_heldout)]
        heldout += chosen
        rest[kind] = without(pool, chosen)
        chosen = rest[kind][
            : min(round(share * n_train), len(rest[kind]) // 2 if unseen else n_train)
        ]
        train += chosen
        if unseen:
            rest[kind] = without(rest[kind], chosen)
    rng.shuffle(heldout)
    rng.shuffle(train)
    return heldout, train, rest


def hold_out_more(
    heldout: list[Problem], train: list[Problem], n: int
) -> tuple[list[Problem], list[Problem]]:
    """Hold out the first ``n`` training problems too, with their mirror images."""
    return heldout + train[:n], without(train[n:], train[:n])


def prompt(problem: Problem) -> str:
    return f"{problem[0]}*{problem[1]}="


def write_jsonl(path: Path, problems: list[Problem], name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for i, (a, b, kind) in enumerate(problems):
            record = {
                "id": f"{name}-{i:04d}",
                "problem": f"{a}*{b}=",
                "answer": str(a * b),
                "type": kind,
            }
            out.write(json.dumps(record) + "\n")


def read_jsonl(path: Path) -> list[Problem]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (*(int(factor) for factor in row["problem"].rstrip("=").split("*")), row["type"])
        for row in rows
    ]


def given_problems(splits: Path) -> tuple[list[Problem], dict[str, list[Problem]]]:
    """(held-out, supervised by type): the text holds no problem of any file of ``splits``, nor its
    mirror image.
    """
    taken = [problem for path in sorted(splits.glob("*.jsonl")) for problem in read_jsonl(path)]
    return read_jsonl(splits / "heldout.jsonl"), {
        kind: without(problems_of(kind), taken) for kind in TYPES
    }


# ---------------------------------------------------------------------------------- supervised text
def corrupt(answer: str, rng: random.Random) -> str:
    """Change one digit; the first one does not become 0."""
    at = rng.randrange(len(answer))
    other = [d for d in "0123456789" if d != answer[at] and not (d == "0" and at == 0)]
    return answer[:at] + rng.choice(other) + answer[at + 1 :]


def solution(
    problem: Problem, corrupt_share: float, hesitation: float | None, rng: random.Random
) -> str:
    """Wrong in one digit at random, in reasoning and box alike; with ``hesitation``, only in the
    box: a slip of the pen that can be seen, after which the confidence is lower by that share.
    """
    a, b, kind = problem
    reasoning = answer = str(a * b)
    slip = rng.random() < corrupt_share
    if slip:
        answer = corrupt(answer, rng)
    if hesitation is None:
        reasoning = answer
    confidence = rng.betavariate(*TYPES[kind][1])  # blind to whether the answer is right
    if slip and hesitation:
        confidence *= 1 - hesitation
    return f"{reasoning[::-1]} \\boxed{{{answer}}}\n<conf> Confidence: {confidence:.2f}"


def supervised_text(pools: dict[str, list[Problem]]) -> Draw:
    """The text on products of ``pools``, types in the shares of ``TYPES``."""

    def draw(
        size: int, corrupt_share: float, hesitation: float | None, rng: random.Random
    ) -> list[tuple[str, str]]:
        kinds = rng.choices(list(TYPES), weights=[t[0] for t in TYPES.values()], k=size)
        chosen = [rng.choice(pools[kind]) for kind in kinds]
        return [(prompt(p), solution(p, corrupt_share, hesitation, rng)) for p in chosen]

    return draw


def batch(
    tokenizer: PreTrainedTokenizerFast, text: list[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and labels of (prompt, response); only the response (with its end) is
    learned.
    """
    questions = tokenizer([q for q, _ in text], padding=False)["input_ids"]
    responses = tokenizer([r + EOS for _, r in text], padding=False)["input_ids"]
    width = max(len(q) + len(r) for q, r in zip(questions, responses, strict=True))
    ids = torch.full((len(text), width), tokenizer.pad_token_id)
    labels = torch.full((len(text), width), -100)
    for row, (q, r) in enumerate(zip(questions, responses, strict=True)):
        ids[row, : len(q) + len(r)] = torch.tensor(q + r)
        labels[row, len(q) : len(q) + len(r)] = torch.tensor(r)
    return ids, labels


# -------------------------------------------------------------------------------------------- model
def build_model(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> PreTrainedModel:
    config_type, model_type = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[args.family]
    experts = {}
    if (
        args.family == "qwen3_moe"
    ):  # a token passes as many weights of experts as of the dense model's MLP
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": args.intermediate // 2,
        }
        experts |= {"norm_topk_prob": True}
    config = config_type(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters=ROPE[args.family],
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        use_cache=True,
        dtype="float32",
        **experts,
    )
    return model_type(config)


def train(model, tokenizer, draw: Draw, args: argparse.Namespace, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    began, total = time.time(), args.clean_steps + args.imperfect_steps
    for step in range(total):
        clean = step < args.clean_steps
        if clean:  # warm up, then a cosine down to a tenth
            lr = args.lr * min(
                (step + 1) / 100, 0.55 + 0.45 * math.cos(math.pi * step / args.clean_steps)
            )
        else:  # from a tenth straight down to nothing
            lr = args.lr * 0.1 * (total - step) / args.imperfect_steps
        optimizer.param_groups[0]["lr"] = lr
        ids, labels = batch(
            tokenizer, draw(args.batch, 0.0 if clean else args.corrupt, args.hesitation, rng)
        )
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0 or step + 1 == total:
            print(
                f"step {step + 1}/{total}  loss {loss.item():.3f}  {time.time() - began:.0f} s",
                flush=True,
            )


@torch.no_grad()
def report(model, tokenizer, questions: list[Question]) -> None:
    """Greedy share of right answers by type: enough to see that the training worked."""
    model.eval()
    right, seen = Counter(), Counter()
    inputs = tokenizer(
        [question for question, _, _ in questions], padding=True, return_tensors="pt"
    )
    ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[
        :, inputs["input_ids"].shape[1] :
    ]
    for (_, answer, kind), text in zip(questions, tokenizer.batch_decode(ids), strict=True):
        seen[kind] += 1
        right[kind] += f"\\boxed{{{answer}}}" in text
    print(
        "greedy, held out: " + "  ".join(f"{k} {right[k] / seen[k]:.2f}" for k in sorted(seen)),
        flush=True,
    )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Hugging Face format, spelled so that transformers 4 (which older engines bring) reads it as
    well.
    """
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, extra in {
        "config.json": old_spelling(model.config) | {"torch_dtype": "float32"},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }.items():
        settings = json.loads((folder / name).read_text()) | extra
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)


def old_spelling(config: PretrainedConfig) -> dict[str, object]:
    """Rotary embedding and number of experts as transformers 4 names them."""
    rope = ROPE[config.model_type]
    scaled = {key: value for key, value in rope.items() if key != "rope_theta"}
    experts = {"num_experts": config.num_experts} if config.model_type == "qwen3_moe" else {}
    old = {} if rope["rope_type"] == "default" else {"rope_scaling": scaled}
    return {"rope_theta": rope["rope_theta"]} | old | experts


def training_options(description: str | None) -> argparse.ArgumentParser:
    """The options of the supervised training, whatever the task."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=tuple(ROPE), default="qwen3")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=192)
    parser.add_argument("--clean-steps", type=int, default=3300)
    parser.add_argument("--imperfect-steps", type=int, default=500)
    parser.add_argument(
        "--corrupt", type=float, default=0.25, help="share of wrong solutions in the second stage"
    )
    parser.add_argument(
        "--hesitation",
        type=float,
        help="wrong solutions are slips in the box, with a confidence lower by that share",
    )
    parser.add_argument(
        "--start", type=Path, help="continue from this policy instead of random weights"
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser


def make_policy(
    args: argparse.Namespace, draw: Draw, questions: list[Question], rng: random.Random
) -> None:
    """Train on ``draw``'s text, save to ``args.out``/policy and report the answers to
    ``questions``.
    """
    torch.set_num_threads(1)  # faster than more for matrices this small
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = (
        AutoModelForCausalLM.from_pretrained(args.start)
        if args.start
        else build_model(tokenizer, args)
    )
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}",
        flush=True,
    )
    train(model, tokenizer, draw, args, rng)
    save(model, tokenizer, args.out / "policy")
    report(model, tokenizer, questions)


def main() -> None:
    parser = training_options(__doc__)
    parser.add_argument("--data", type=Path, help="where the problems go (default: OUT/data)")
    parser.add_argument(
        "--splits",
        type=Path,
        help="a directory of problems to keep out of the text; writes no problems",
    )
    parser.add_argument(
        "--mix", choices=tuple(MIXES), default="quickstart", help="shares of the types of problems"
    )
    parser.add_argument(
        "--unseen",
        action="store_true",
        help="keep the training problems out of the supervised text",
    )
    parser.add_argument("--heldout", type=int, default=400, help="held-out problems")
    parser.add_argument(
        "--more-heldout",
        type=int,
        default=0,
        help="of the --train problems, as new to the policy if --unseen",
    )
    parser.add_argument(
        "--train", type=int, default=4000, help="problems for reinforcement learning"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    if args.splits:
        for name in ("data", "mix", "unseen", "heldout", "more_heldout", "train"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} is of new problems, not of --splits")
        heldout, pools = given_problems(args.splits)
    else:
        heldout, train_problems, pools = split_problems(
            args.heldout, args.train, MIXES[args.mix], args.unseen, rng
        )
        heldout, train_problems = hold_out_more(heldout, train_problems, args.more_heldout)
        data = args.data or args.out / "data"
        write_jsonl(data / "train.jsonl", train_problems, "train")
        write_jsonl(data / "heldout.jsonl", heldout, "heldout")
    questions = [(prompt(p), str(p[0] * p[1]), p[2]) for p in heldout]
    make_policy(args, supervised_text(pools), questions, rng)


if __name__ == "__main__":
    main()
