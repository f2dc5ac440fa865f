"""An OpenAI-compatible server whose answers carry a fitted confidence: a proxy in front of another
server (``dcpo serve``), or a middleware inside vLLM.

    request --asking--> upstream --whole_reply, stream--> choices --scorer--> confidence of each

With a predictor of each turn the upstream is asked for a number behind each choice (``branch``).

It imports neither torch nor Megatron nor vLLM.
"""
