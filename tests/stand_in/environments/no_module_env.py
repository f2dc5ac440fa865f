"""An environment that lacks a library."""

import a_library_that_is_not_there  # noqa: F401
