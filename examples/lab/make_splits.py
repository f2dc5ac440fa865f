"""Make the lab's test problems: test.jsonl and final.jsonl beside train.jsonl, once, from fixed
seeds.

    python examples/lab/make_splits.py            # writes both into data/ beside this file

| file | problems | used for |
|---|---|---|
| `train.jsonl` | 3,158 | reinforcement learning |
| `heldout.jsonl` | 1,200 | validation: every choice of a setting, and what is fitted afterwards |
| `test.jsonl` | 1,200, as many of each type as in validation | the tables of the test |
| `final.jsonl` | 601, half as many of each type | the last table, computed once, on pretrainings of
its own |

No problem, nor its mirror image b*a, is in two of the files. The supervised text of a policy made
with `make_policy.py --splits` holds none of them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "quickstart"))

from make_policy import problems_of, read_jsonl, without, write_jsonl  # noqa: E402

SEED, SEED_OF_FINAL = 20261123, 20261125


def make_splits(data: Path, out: Path) -> None:
    """Write ``out``/test.jsonl and final.jsonl, disjoint from each other and from train and
    heldout.jsonl of ``data``.
    """
    validation = read_jsonl(data / "heldout.jsonl")
    taken = validation + read_jsonl(data / "train.jsonl")
    for name, seed, share in (("test", SEED, 1), ("final", SEED_OF_FINAL, 2)):
        rng, chosen = random.Random(seed), []
        for kind, count in sorted(Counter(p[2] for p in validation).items()):
            chosen += rng.sample(without(problems_of(kind), taken), -(-count // share))
        rng.shuffle(chosen)
        write_jsonl(out / f"{name}.jsonl", chosen, name)
        taken = taken + chosen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "data")
    make_splits(HERE / "data", parser.parse_args().out)
