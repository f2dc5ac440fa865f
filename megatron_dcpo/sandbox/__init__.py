"""A program and its tests become a verdict, in isolation. Knows nothing of responses
(docs/programs.md).
"""
