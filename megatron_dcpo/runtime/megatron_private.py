"""Every name that Megatron-core and torch keep private and the package uses, in one place.

A new release is checked here first: a name that moved fails when this module is imported, with its name.
"""

from __future__ import annotations

import torch.distributed as dist


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()
