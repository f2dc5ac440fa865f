"""From a response (token ids or text) to correctness, confidence and the boundary between the two blocks.

| file | what it holds |
|---|---|
| `judge.py` | the one judge of training and evaluation: `Response` to `Judgement` |
| `answers.py` | how an answer is marked: a box, or a fenced program |
| `blocks.py` | reasoning and confidence block, on sampled ids and on text |
| `confidence.py` | strict parser of the stated confidence |
| `token_bytes.py` | token id to bytes, byte-level BPE and sentencepiece |
| `programs.py` | is a program right: its tests, in the sandbox |
| `math/pool.py`, `math/worker.py` | is a boxed answer right: processes with hard time limits, and a cache |
| `math/equivalence.py` | are two answers the same: notation, form, then math-verify |
| `math/latex.py`, `math/answer_forms.py` | one spelling per answer; numerals with a base, ratios, sets, units |
"""
