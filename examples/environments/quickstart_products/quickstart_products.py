"""An environment of PrimeIntellect's verifiers: the quickstart's products, with a rubric of their
own. It is written as such environments are, and knows nothing of Megatron-DCPO.
"""

import random
import re

import verifiers as vf
from datasets import Dataset


def products(count, seed):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randint(2, 99), draw.randint(2, 9)
        prompt = [{"role": "user", "content": f"{a}*{b}="}]
        rows.append({"prompt": prompt, "answer": str(a * b), "info": {"digits": len(str(a))}})
    return Dataset.from_list(rows)


def boxed(completion):
    found = re.findall(r"\\boxed\{(-?\d+)\}", completion[-1]["content"])
    return found[-1] if found else None


def right(completion, answer, **kwargs):
    return float(boxed(completion) == answer)


def has_box(completion, **kwargs):
    return float(boxed(completion) is not None)


def load_environment(count=400, seed=0):
    return vf.SingleTurnEnv(
        dataset=lambda: products(count, seed),
        eval_dataset=lambda: products(100, seed + 1_000_000),
        rubric=vf.Rubric(funcs=[right, has_box], weights=[1.0, 0.2]),
    )
