"""Judge a response, given as token ids or as text: its correctness, its confidence, and the
boundary between its two blocks.
"""
