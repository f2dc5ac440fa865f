"""Not installed: it would use httpx."""

raise ImportError
