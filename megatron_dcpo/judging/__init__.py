"""From sampled token ids to correctness, confidence and the boundary between the two blocks.

| file | what it holds |
|---|---|
| `judge.py` | the three together: `Response` to `Judgement` |
| `confidence.py` | strict parser of the stated confidence |
| `blocks.py` | reasoning and confidence block on sampled ids |
| `answers.py` | how an answer is marked: a box, or a fenced program |
| `token_bytes.py` | token id to bytes, byte-level BPE and sentencepiece |
| `boxes.py` | brace-matched boxes |
| `math.py` | is the boxed answer right |
| `equivalence.py` | are two answers the same: notation, shape, then math-verify |
| `notation.py`, `shapes.py` | one spelling per answer; numerals with a base, ratios, sets, units |
| `pool.py`, `worker.py` | verification in processes with hard timeouts and a cache |
| `programs.py` | the fenced program of a response, and the confidence behind it |
| `code.py` | R for programs: a pool of sandboxes, one verdict per program |
| `code_tests.py`, `stdout.py`, `verdict.py` | kinds of tests; when outputs are the same; categories |
| `sandbox.py`, `remote.py` | bubblewrap, Landlock or none here; a remote service |
| `inside/` | what runs inside the sandbox |
| `disagreements.py` | where the verifier and plain string equality differ |
| `program_verifier.py` | programs against the tests of their problem, for training and evaluation |
| `program_text.py` | are two programs the same text, which is what their agreement means |
"""
