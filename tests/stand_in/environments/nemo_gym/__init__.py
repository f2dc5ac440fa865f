"""A stand-in for NeMo Gym, with the names that are relied on."""
