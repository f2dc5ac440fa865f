"""Errors that are the user's to fix."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: one clear line naming the thing and the fix; the command line prints it and exits with status 2."""
