class Float8Tensor:
    """For ``isinstance``: nothing here has eight bits."""
