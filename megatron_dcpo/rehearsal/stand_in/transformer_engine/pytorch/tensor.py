class QuantizedTensor:
    """For ``isinstance``: nothing here is quantised."""
