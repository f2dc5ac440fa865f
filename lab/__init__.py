"""The lab: the paper's theory on exact cases, and a test of its methods on tiny policies. It
imports the package.

| file | what it holds |
|---|---|
| `theory/` | `scoring_rules.py`, `gradient_conflict.py`, `drift.py`: one claim each; `run.py`:
their numbers and figures |
| `testgrid.py` | the methods; training and sampling every cell of the test, cached; the archive of
its responses |
| `fitted.py` | judged responses, and rows that are fitted on them |
| `testtables.py`, `world2.py`, `results.py` | the tables of the test, of the second world;
archives, intervals |
"""
