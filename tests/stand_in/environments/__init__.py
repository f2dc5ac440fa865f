"""Stand-ins for verifiers and NeMo Gym, and environments of theirs, for a PYTHONPATH of a process
that runs an environment.
"""
