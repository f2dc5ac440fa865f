"""An environment of PrimeIntellect's verifiers with a tool: products, and a pocket calculator that
may be asked for them. It is written as such environments are, and knows nothing of Megatron-DCPO.
"""

import random
import re

import verifiers as vf
from datasets import Dataset

DISPLAY = 4  # digits
KINDS = [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]  # digits of the two factors


def multiply(a: int, b: int) -> str:
    """Multiply two numbers. The display has four digits, shown from the last to the first.

    Args:
        a: the first factor
        b: the second factor
    """
    product = str(a * b)
    return product[::-1] if len(product) <= DISPLAY else "E"


def products(count, seed):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = (draw.randrange(10 ** (n - 1), 10**n) for n in draw.choice(KINDS))
        prompt = [{"role": "user", "content": f"{a}*{b}="}]
        rows.append({"prompt": prompt, "answer": str(a * b), "info": {"product": a * b}})
    return Dataset.from_list(rows)


def right(completion, answer, **kwargs):
    said = completion[-1]["content"] or ""
    return float(re.findall(r"\\boxed\{(\d+)\}", said)[-1:] == [answer])


def load_environment(count=2000, seed=0):
    return vf.ToolEnv(
        tools=[multiply],
        max_turns=3,
        dataset=lambda: products(count, seed),
        eval_dataset=lambda: products(200, seed + 1_000_000),
        rubric=vf.Rubric(funcs=[right]),
    )
