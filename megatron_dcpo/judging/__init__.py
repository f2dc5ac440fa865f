"""From a response (token ids or text) to correctness, confidence and the boundary between the two
blocks.
"""
