"""The lab's test problems: test.jsonl and ood.jsonl beside train.jsonl, made once, from a fixed seed.

    python examples/lab/make_splits.py            # writes data/test.jsonl and data/ood.jsonl beside this file

| file | problems | used for |
|---|---|---|
| `train.jsonl` | 3,158 | reinforcement learning; fitting of classifiers and recalibrations |
| `heldout.jsonl` | 1,200 | validation: every choice of a setting (the problems of the published grid) |
| `test.jsonl` | 1,200, as many of each type as in validation | the tables of the test, once |
| `ood.jsonl` | 300 of 4x1 and 300 of 3x3 digits, types that no text or training has | out of distribution |

No problem, nor its mirror image b*a, is in two of the files. The supervised text of a policy made with
`make_policy.py --splits` holds none of them.
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

SEED = 20261123
OOD = {"4x1": 300, "3x3": 300}


def make_splits(data: Path, out: Path) -> None:
    """Write ``out``/test.jsonl and ``out``/ood.jsonl, disjoint from the train.jsonl and heldout.jsonl of ``data``."""
    rng = random.Random(SEED)
    validation = read_jsonl(data / "heldout.jsonl")
    taken = validation + read_jsonl(data / "train.jsonl")
    test = []
    for kind, count in sorted(Counter(p[2] for p in validation).items()):
        test += rng.sample(without(problems_of(kind), taken), count)
    rng.shuffle(test)
    ood = [problem for kind, count in OOD.items() for problem in rng.sample(problems_of(kind), count)]
    rng.shuffle(ood)
    write_jsonl(out / "test.jsonl", test, "test")
    write_jsonl(out / "ood.jsonl", ood, "ood")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    make_splits(HERE / "data", parser.parse_args().out)
