"""The lab: the paper's theory on cases that can be exact, probes of real policies, and the grid of trainings.

| file | what it holds |
|---|---|
| `exact_conflict.py`, `collapse.py`, `estimators.py`, `properness.py` | the theory, pure NumPy |
| `theory.py` | its numbers and figures |
| `policy_probe.py` | ``dcpo probe``: gradient conflict and noise on a policy, under any layout |
| `cells.py`, `runner.py` | the grid of methods and seeds; running it, cached |
| `results.py`, `statistics.py`, `tables.py`, `figures.py`, `render.py` | what is published of it: ``docs/lab`` |

``python -m lab run|render|theory``; `docs/lab/README.md` maps the paper's tables and figures to files.
"""
