"""Is an answer of mathematics right? ``verifier.py`` asks ``pool.py``, whose processes run
``equivalence.py``.
"""
