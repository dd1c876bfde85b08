"""`hide_answers_in_logs`: what other libraries log of their own accord when a request or a login fails, without the words of servers and programs."""

import logging

from trainfold.backends.stores.object_store.errors.shown_errors import without_secrets


def hide_answers_in_logs(*names: str) -> None:
    """Take what may be secret out of the errors that loggers record: most programs print warnings.

    Args:
        names: of the loggers.
    """
    for name in names:
        logging.getLogger(name).addFilter(_without_answers)


def hide_logins_of_aws() -> None:
    """Do so for what botocore and aiobotocore say of a login that cannot be renewed: it has what the program of a ``credential_process`` has printed."""
    hide_answers_in_logs(
        *(f"{library}.{module}" for library in ("botocore", "aiobotocore") for module in ("credentials", "tokens"))
    )


def _without_answers(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = f"{record.funcName}: {without_secrets(record.exc_info[1])}", ()
        record.exc_info = record.exc_text = None
    return True
