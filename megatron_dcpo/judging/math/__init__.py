"""Decide whether a mathematical answer is right: ``pool.py`` starts the processes, which run
``equivalence.py``.
"""
