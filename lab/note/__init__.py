"""The note after the answer (``docs/lab/note.md``): who reads what comes behind the last sampled
token.

| file | what it holds |
|---|---|
| `transcripts.py` | graphs to fit, frozen answers, notes behind them |
| `reading.py` | what a policy shows of transcripts; readers fitted on it; the numbers it writes |
| `arms.py` | the arms |
| `cells.py` | the stages of a pretraining; what is finished is kept |
| `tables.py` | endpoints and tables, from the records |
"""
