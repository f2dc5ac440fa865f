"""Make the lab's test problems: test.jsonl beside train.jsonl, once, from a fixed seed.

    python examples/lab/make_splits.py            # writes data/test.jsonl beside this file

| file | problems | used for |
|---|---|---|
| `train.jsonl` | 3,158 | reinforcement learning |
| `heldout.jsonl` | 1,200 | validation: every choice of a setting, and what is fitted afterwards |
| `test.jsonl` | 1,200, as many of each type as in validation | the tables of the test |

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


def make_splits(data: Path, out: Path) -> None:
    """Write ``out``/test.jsonl, disjoint from the train.jsonl and heldout.jsonl of ``data``."""
    rng = random.Random(SEED)
    validation = read_jsonl(data / "heldout.jsonl")
    taken = validation + read_jsonl(data / "train.jsonl")
    test = []
    for kind, count in sorted(Counter(p[2] for p in validation).items()):
        test += rng.sample(without(problems_of(kind), taken), count)
    rng.shuffle(test)
    write_jsonl(out / "test.jsonl", test, "test")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    make_splits(HERE / "data", parser.parse_args().out)
