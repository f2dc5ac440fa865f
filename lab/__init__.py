"""The lab: the paper's theory on exact cases, and a test of its methods on tiny policies. It imports the package.

| file | what it holds |
|---|---|
| `theory/scoring_rules.py`, `estimators.py`, `gradient_conflict.py`, `drift.py` | one claim each |
| `theory/run.py` | their numbers and figures |
| `testgrid.py` | the methods; training and sampling every cell of the test, cached; the archive of its responses |
| `fitted.py` | judged responses, and rows that are fitted on them |
| `testtables.py`, `testfigures.py` | the tables and the curves of the test |
| `world2.py` | the second world: the test on graphs |
| `results.py` | archives, intervals |

``python -m lab test|test-tables|world2|theory``; the results are in `docs/lab/README.md`.
"""
