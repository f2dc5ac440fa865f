"""Stand-ins of NeMo Gym."""
