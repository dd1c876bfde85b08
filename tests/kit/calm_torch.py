"""What torch does at each call, and pytest for each of torch's loggers, for nothing: it was half of the time of a short test."""

import logging
from typing import Any

import torch


def forget_absent_devices() -> None:
    """Let `torch.manual_seed` leave out devices that this machine does not have: for each, it would keep the stack of its caller as text."""
    devices: Any = (torch.cuda, torch.xpu, torch.mtia)
    for device in devices:
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def share_loggers() -> None:
    """Let torch's loggers pass what they log to the one above them, which has the same handler.

    pytest adds two handlers to each logger that passes nothing on, and removes them, three times for each test; torch has forty such loggers.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and logger.handlers and not logger.level:
            logger.handlers.clear()
            logger.propagate = True
