"""Errors that are the user's to mend."""


class UserError(Exception):
    """Bad input: one clear line with the file, key or tensor and what to do. The command line exits with 2."""


def first_cause(error: BaseException) -> str:
    """What the system refused, or what the user should mend, rather than what a library made of it; on one line."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, UserError):
            return str(cause)
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
