"""The lab: the paper's theory on exact cases, and a test of its methods on tiny policies. It
imports the package.

| file | what it holds |
|---|---|
| `theory/` | `scoring_rules.py`, `gradient_conflict.py`, `drift.py`: one claim each; `run.py` |
| `testgrid.py` | the methods; training and sampling every cell of the test; their archive |
| `gradient_probe.py` | gradients of two parts of a loss against each other; a `training.callback` |
| `probe.py` | gradients of accuracy and calibration against each other, on any policy |
| `fitted.py` | judged responses, and rows that are fitted on them |
| `testtables.py`, `world2.py`, `price.py` | tables of the test and two studies |
| `confidences.py` | confidences that are fitted on one policy's answers: arms, records, tables |
| `adapter.py`, `language_model.py` | two studies of them, on the quickstart and on SmolLM2 |
| `note/` | who reads a note that comes after the answer: readers, arms, stages, tables |
| `results.py` | archives, intervals |
"""
