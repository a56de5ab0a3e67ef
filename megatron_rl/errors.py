"""Errors that are the user's to mend."""


class UserError(Exception):
    """Bad input: one clear line with the file, key or tensor and what to do. The command line exits with 2."""
