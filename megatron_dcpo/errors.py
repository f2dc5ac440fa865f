"""The one error that is the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: one clear line naming the thing and the fix. The command line prints it and exits with status 2."""
