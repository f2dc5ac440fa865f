"""The lab: the paper's theory on cases that can be exact, and the grid of trainings. It imports the package.

| file | what it holds |
|---|---|
| `theory/scoring_rules.py`, `gradient_conflict.py`, `estimators.py`, `mode_collapse.py`, `tag_credit.py` | one claim each |
| `theory/run.py` | their numbers and figures |
| `grid.py`, `runner.py` | the grid of methods and seeds; running it, cached |
| `results.py` | the archive of finished cells, means and intervals over seeds |
| `testgrid.py`, `testtables.py` | the test: several pretrainings, problems that chose no setting; its records and tables |
| `world2.py` | the second world: the test on graphs |
| `tables.py`, `figures.py`, `publish.py` | what is published of it: ``docs/lab`` |

``python -m lab run|render|test|test-tables|world2|theory``; `docs/lab/README.md` maps the paper's tables and figures to
files. The probes of a policy, ``dcpo probe``, are `megatron_dcpo/training/probe.py`.
"""
