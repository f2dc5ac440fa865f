"""A model on benchmarks: accuracy and calibration, reports, post-hoc predictors.

| file | what it holds |
|---|---|
| `run.py` | `EvaluationConfig` and `run_evaluation`: all of `dcpo evaluate` but its command line |
| `evaluate.py` | one benchmark: sample, judge, collect; judging old samples again; the files of an evaluation |
| `samples.py` | the judged sample, `samples.jsonl`, and the log of an evaluation in progress |
| `programs.py` | the tests beside `samples.jsonl`; whether two programs are the same text |
| `scoring.py` | judged samples to `evaluation.json` |
| `posthoc.py` | predictors of confidence fitted on judged samples |
| `report.py`, `report.html.j2` | the page that compares runs |
| `published.py`, `published.csv` | the paper's numbers beside ours |
"""
