"""An OpenAI-compatible server whose answers carry a fitted confidence: a proxy in front of another
server (``dcpo serve``), or a middleware inside vLLM.

    request --asking--> upstream --whole_reply, stream--> choices --scorer--> confidence of each

It imports neither torch nor Megatron nor vLLM.
"""
