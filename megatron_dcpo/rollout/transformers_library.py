"""The transformers library without what is not needed of it."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch


def redirect_transformers_logging() -> None:
    """Send the warnings of transformers, which quote the files of a model, through our logging, and
    draw no progress bar.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    transformers_logging.disable_progress_bar()


def auto_class(name: str) -> Any:  # noqa: ANN401 - a class of transformers
    """Return ``AutoTokenizer`` or ``AutoModelForCausalLM``. Their import would bring in installed
    scikit-learn and pandas (1 s), and that of a model SciPy (0.4 s), for a kind of generation and
    for losses that are not used here.
    """
    import transformers

    without = partial(patch.object, transformers.utils, new=bool)
    with without("is_sklearn_available"), without("is_scipy_available"):
        if name == "AutoModelForCausalLM":
            import_module("transformers.loss.loss_utils")
        return getattr(transformers, name)
